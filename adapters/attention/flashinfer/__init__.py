"""Attention on NVIDIA GPUs by FlashInfer, over the paged KV cache."""
