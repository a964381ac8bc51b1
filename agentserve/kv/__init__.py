"""Logical KV blocks, their pools, the prefix index. Torch-free."""
