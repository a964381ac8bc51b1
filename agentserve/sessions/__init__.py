"""Sessions: turn tree, template, tool-call stream, store."""
