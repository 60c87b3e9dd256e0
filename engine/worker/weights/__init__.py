"""Weights: reading checkpoints, quantising, caching, and random weights."""
