"""Everything about a GPU in one command, in under eight minutes: is it right, and how fast.

    python -m examples.benchmarks.gpu [--out DIR] [--minutes 8] [--device cuda]

Runs the tests that need a GPU, the worker alone on random weights of named shapes beside the limits
of this GPU, and the whole server under 256 streams. Needs torch with CUDA and FlashInfer, and no
network. Each stage has a time of its own; one that fails or takes too long is written down, and the
others still run. The result is a page and a JSON file named by GPU and date. `--device cpu`
rehearses the same stages on the smallest shape.
"""

import argparse
import platform
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from examples.benchmarks.gpu.page import page, write
from examples.benchmarks.gpu.plan import Plan
from examples.benchmarks.gpu.stages import Outcome, run_all

RESULTS = Path(__file__).parents[1] / "results" / "gpu"


def missing() -> str:
    """What this machine lacks, in a line; empty if nothing."""
    from engine.worker.cuda.requirements import missing as lacks

    return lacks(wants_kernels=True)


def machine(device: str) -> dict[str, str]:
    """What the figures belong to."""
    import torch

    name = platform.processor() or platform.machine()
    if device != "cpu":
        name = torch.cuda.get_device_name(torch.device(device))
    facts = {"device": name if device != "cpu" else f"cpu {name}"}
    facts["when"] = datetime.now(UTC).isoformat(timespec="minutes")
    for package in ("podway", "torch", "flashinfer-python"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device != "cpu":
        facts["CUDA"] = str(torch.version.cuda)
        facts["GPU memory"] = f"{torch.cuda.get_device_properties(0).total_memory >> 30} GiB"
    return facts


def tell(outcome: Outcome) -> None:
    """A line on the terminal as a stage ends."""
    print(f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)


def main() -> int:
    """1 if a stage did not come to a good end, or there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a rehearsal")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and (lacks := missing()):
        print(f"no check of a GPU here: {lacks}", file=sys.stderr)
        return 1
    facts = machine(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        stages = Plan.of(arguments.device, Path(folder)).stages()
        outcomes = run_all(stages, 60 * arguments.minutes - 10, tell)
    path = write(arguments.out, facts, outcomes)
    print(f"\n{page(facts, outcomes)}\nwritten to {path}")
    return 0 if all(outcome.status == "done" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
