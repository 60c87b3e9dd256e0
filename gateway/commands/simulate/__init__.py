"""`podway simulate`: the serving engine in virtual time, with a cost model instead of a worker."""
