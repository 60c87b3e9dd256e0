"""Numba kernels of the CPU, each `kernel(operands, chunk, thread)` over addresses."""
