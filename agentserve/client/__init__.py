"""The Python client: one protocol core that does no I/O, driven by a sync and an async shell."""
