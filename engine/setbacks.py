"""Setbacks: how often a request lost its KV, or its turn."""

from dataclasses import dataclass


@dataclass(slots=True)
class Setbacks:
    """How often one request had to wait for others, or to be computed again."""

    num_preemptions: int = 0  # times that its KV was dropped, to be recomputed
    num_swaps: int = 0  # times that its KV was swapped out
    num_step_overs: int = 0  # later requests admitted before it since it last got its KV
