"""The cost of iterations on this machine: measured before the server is ready, and saved."""
