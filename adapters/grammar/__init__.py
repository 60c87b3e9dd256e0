"""Constrained decoding behind the port `engine.grammar`."""
