"""Adapters of external libraries and formats to the ports of the engine and the gateway."""
