"""The default of `--lookahead`: whether iterations are planned before the tokens of the previous
one are known.

Lookahead saves the worker the wait for the event loop between two steps, about a millisecond. On
a GPU it is always on. On a CPU it is on only if the loop has a core of its own (otherwise it takes
one from the compute threads) and if steps are short, since a new request waits for one more
planned step. Measurements are in `examples/benchmarks/results/lookahead`.
"""

from engine.cost.model import CostModel
from engine.worker_settings import WorkerReport
from gateway.serve.cores import cores_of_machine
from gateway.settings.settings import Settings

SHORT_STEP = 0.02  # seconds of a decode step of one request; the wait saved is a twentieth of it


def max_lookahead(settings: Settings) -> int:
    """0 or 1: the most that `choose_lookahead` may return, known before the workers start."""
    if settings.launch.lookahead == "auto":
        return int(settings.workers.num_stages == 1)
    return int(settings.launch.lookahead)


def choose_lookahead(
    settings: Settings, report: WorkerReport, cost: CostModel, num_replicas: int = 1
) -> int:
    """0 or 1, at most `max_lookahead`."""
    if settings.launch.lookahead != "auto" or not max_lookahead(settings):
        return max_lookahead(settings)
    if report.device.startswith("cuda"):
        return 1
    computing = report.threads * settings.workers.num_ranks * num_replicas
    loop_has_core = settings.launch.launcher == "local" and computing < len(cores_of_machine())
    return int(loop_has_core and cost.compute(1, 0) < SHORT_STEP)
