"""The control plane: which requests run in the next iteration, and what its result means."""
