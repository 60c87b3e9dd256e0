"""The engine: the control plane at this level, workers, transports and simulation below it."""
