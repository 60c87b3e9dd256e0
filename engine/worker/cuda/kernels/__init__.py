"""Triton kernels for GPUs. Only this package imports Triton, and `library` loads it when a worker
opens a GPU. Each kernel has a plain torch reference, which also runs where Triton cannot."""
