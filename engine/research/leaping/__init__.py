"""Simulation that takes many iterations of the same decodes at once, with equal figures."""
