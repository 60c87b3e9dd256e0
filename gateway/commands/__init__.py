"""The commands besides `podway serve`: clients of any OpenAI-compatible server, and simulation."""
