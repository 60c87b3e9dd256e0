"""Whether iterations are planned before the tokens that they go on from are known, if nobody says.

It spares the worker the wait for the loop between two steps, about a millisecond. On a GPU that is
always worth it. On the CPU only where the loop has a core of its own, or it takes one from the
threads that compute; and where steps are so short that it shows, because whoever arrives waits
for one planned step more. What was measured is in `examples/benchmarks/results/lookahead`.
"""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cost.model import CostModel
    from engine.step import WorkerReport
    from gateway.serve.settings import Settings

SHORT_STEP = 0.02  # seconds of a decode alone; a millisecond is a twentieth of it


def most_lookahead(settings: "Settings") -> int:
    """What workers have to be ready for, before it is known what they compute on."""
    if settings.lookahead == "auto":
        return int(settings.pipeline_stages == 1)
    return int(settings.lookahead)


def chosen_lookahead(settings: "Settings", report: "WorkerReport", cost: "CostModel") -> int:
    """What is done: 0 or 1, at most `most_lookahead`."""
    if settings.lookahead != "auto" or not most_lookahead(settings):
        return most_lookahead(settings)
    if report.device.startswith("cuda"):
        return 1
    computing = report.threads * settings.tensor_ranks
    is_apart = settings.launcher == "local" and computing < _num_cores()
    return int(is_apart and cost.compute(1, 0) < SHORT_STEP)


def _num_cores() -> int:
    """Cores that this process may use, and with it the workers that it starts."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
