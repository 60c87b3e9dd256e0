"""HTTP to token streams and back: OpenAI's wire, limits, metrics, the command line."""
