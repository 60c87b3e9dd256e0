"""Mixtures of experts, one file for each family."""
