"""Upgrades: a running server starts its successor, and hands over to it when it is ready."""
