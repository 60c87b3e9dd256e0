"""Clients of any OpenAI-compatible server: a terminal chat and a load generator."""
