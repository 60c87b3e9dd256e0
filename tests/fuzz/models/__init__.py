"""Random model configurations of every family, compared with transformers."""
