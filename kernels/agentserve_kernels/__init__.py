"""Compute kernels; each file holds a plain reference beside the fast version."""
