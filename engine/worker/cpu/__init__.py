"""Kernels for the CPU, compiled by Numba, and the thread pool that runs them.

Rule of this package: the bits of a row never depend on the other rows of the batch. Every sum
adds in an order that only the sizes of the layer determine, so a token has the same bits whether
it is computed alone, as part of a prompt or beside 63 others.
"""
