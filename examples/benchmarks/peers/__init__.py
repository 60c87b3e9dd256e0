"""Podway beside other servers on this machine: how each is started, its loads, the tables."""
