"""Settings of `podway serve`: flags, PODWAY_* variables and TOML files fill the same fields."""
