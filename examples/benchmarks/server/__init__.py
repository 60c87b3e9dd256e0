"""Benchmarks of one whole server."""
