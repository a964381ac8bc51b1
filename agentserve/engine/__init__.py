"""The engine: one loop that plans, launches, samples and commits. Torch-free."""
