"""The check of a GPU: its stages, and the page that reports their results."""
