"""`podway bench --offline`: a worker alone, on random weights of a named shape."""
