"""Benchmarks of several servers behind a router."""
