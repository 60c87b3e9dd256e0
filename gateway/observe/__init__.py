"""Metrics, recordings and event-loop lag: observers of the engine and of the loop."""
