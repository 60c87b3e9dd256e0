"""Images of requests: where their bytes come from, and their preparation for the encoder."""
