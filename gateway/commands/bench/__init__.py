"""`podway bench URL`: a load generator for any OpenAI-compatible server."""
