"""The config.json fields of well-known models, for checkpoints with random weights."""
