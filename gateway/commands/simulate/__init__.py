"""`podway simulate`: the serving engine in virtual time."""
