"""Constrained decoding on JSON schemas: random ones from a seed, and handwritten ones."""
