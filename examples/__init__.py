"""Numbered scripts to learn from, benchmarks, and the training of the built-in model."""
