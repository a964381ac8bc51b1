"""The same kernels for a GPU, in Triton; importing them needs triton, but no GPU.

Whoever imports `agentserve_kernels` alone does not import triton.
"""
