"""Podway as a Ray Serve application; README.md says how to run it."""
