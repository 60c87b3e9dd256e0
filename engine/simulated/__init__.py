"""Simulation: the same engine in virtual time, on an executor that only waits, with traces."""
