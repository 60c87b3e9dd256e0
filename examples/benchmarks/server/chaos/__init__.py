"""A real server under mixed load while something fails every few seconds."""
