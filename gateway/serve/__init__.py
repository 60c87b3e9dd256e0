"""`podway serve`: from settings to a running server, and its orderly end."""
