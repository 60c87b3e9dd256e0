"""Shared by the examples that measure the real engine: a model, its worker, loads and runs."""
