"""Sampling on the last stage: logits processors, filters, constraints, log-probabilities."""
