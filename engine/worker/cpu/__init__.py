"""Float32 kernels for the CPU, compiled by Numba, and the team of threads that runs them.

Rule of the room: the bits of a row never depend on what else is in the batch. Every sum runs in
an order fixed by the layer's own sizes, so a token computed alone, in a prompt or beside 63
others is the same token.
"""
