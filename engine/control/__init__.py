"""The control plane: decides which requests run in the next iteration and applies its result."""
