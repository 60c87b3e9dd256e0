"""API keys, quotas, retries, and the identity of each caller."""
