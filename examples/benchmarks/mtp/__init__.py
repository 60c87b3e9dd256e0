"""A small hybrid with a trained layer for multi-token prediction, and what its drafts are worth."""
