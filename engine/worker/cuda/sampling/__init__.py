"""Sampling on a GPU, for all rows at once."""
