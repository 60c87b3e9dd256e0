"""Speculation off and on, in engines and in servers."""
