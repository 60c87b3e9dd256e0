"""Batches at work: lines of a file answered in the background, as the routes would."""
