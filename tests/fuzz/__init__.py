"""Malformed requests, and a server that gets them."""
