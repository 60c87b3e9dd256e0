"""Simulations at full size: the papers' headlines and an hour of production."""
