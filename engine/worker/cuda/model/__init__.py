"""Operators and linear layers on a GPU."""
