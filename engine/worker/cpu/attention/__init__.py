"""Attention over the paged KV cache on the CPU, in Numba kernels."""
