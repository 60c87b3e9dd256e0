"""`podway bench --offline`: times a worker with random weights of a named shape."""
