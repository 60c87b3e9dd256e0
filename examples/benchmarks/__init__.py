"""Benchmarks, each one command, with their committed results."""
