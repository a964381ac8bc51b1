"""Weights, forward pass and sampler. The only part that imports torch."""
