"""Families with attention and recurrent layers."""
