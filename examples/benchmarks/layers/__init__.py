"""Benchmarks of parts of a model, in one process."""
