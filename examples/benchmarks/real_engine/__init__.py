"""Measurements on the real engine: a small model, its worker, loads and runs."""
