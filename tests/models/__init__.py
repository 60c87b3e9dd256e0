"""Checkpoints, adapters and shapes of models that tests make."""
