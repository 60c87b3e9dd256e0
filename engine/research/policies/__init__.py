"""Policies that have beaten FCFS nowhere on the real engine, or that know more than it can.

`engine.policy.table` has them by name, for simulation only.
"""

ORACLES = ("srpt",)  # they know the length of an output before it ends
