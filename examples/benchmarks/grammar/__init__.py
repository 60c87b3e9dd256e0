"""JSON schemas to try constrained decoding on: random ones from a seed, and some by hand."""
