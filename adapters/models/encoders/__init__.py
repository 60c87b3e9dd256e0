"""Encoders, whose attention is bidirectional."""
