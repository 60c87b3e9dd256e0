"""The GPU check in one command, in under nine minutes: correctness, then speed.

    python -m examples.benchmarks.gpu [--out DIR] [--minutes 9] [--device cuda] [--resume JSON]

Builds FlashInfer's kernels, runs the tests that need a GPU, benchmarks a worker on random weights
of named shapes beside the limits of this GPU, and the whole server under 256 streams. Needs torch
with CUDA, and no network. Each stage has its own time limit; a stage that fails is reported and
the others still run. The page and its JSON, named by GPU and date, are written after every stage;
`--resume` continues a check that was cut short. `--device cpu` rehearses the same stages on the
smallest shape. `offline_kit` prepares a machine without network.
"""

import argparse
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from examples.benchmarks.gpu.page import page, read, write
from examples.benchmarks.gpu.plan import Plan
from examples.benchmarks.gpu.stages import Outcome, run_all
from gateway.version import podway_version

RESULTS = Path(__file__).parents[1] / "results" / "gpu"


def missing(*, wants_kernels: bool) -> str:
    """What this machine lacks, in one line; empty if nothing."""
    from engine.worker.cuda import requirements

    return requirements.missing(wants_kernels=wants_kernels)


def machine(device: str) -> dict[str, str]:
    """The machine and the versions that the figures belong to."""
    import torch

    name = platform.processor() or platform.machine()
    if device != "cpu":
        name = torch.cuda.get_device_name(torch.device(device))
    facts = {"device": name if device != "cpu" else f"cpu {name}"}
    facts["when"] = datetime.now(UTC).isoformat(timespec="minutes")
    facts["podway"] = podway_version()
    for package in ("torch", "flashinfer-python"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device != "cpu":
        facts["CUDA"] = str(torch.version.cuda)
        facts["GPU memory"] = f"{torch.cuda.get_device_properties(0).total_memory >> 30} GiB"
    return facts


def main() -> int:
    """The exit code: 1 if a stage failed or did not run, or there is no GPU."""
    arguments = parser().parse_args()
    lacking = "" if arguments.device == "cpu" else missing(wants_kernels=False)
    if lacking:
        print(f"the GPU check cannot run here: {lacking}", file=sys.stderr)
        return 1
    lacking = "" if arguments.device == "cpu" else missing(wants_kernels=True)
    facts = machine(arguments.device)
    if lacking:
        facts["FlashInfer"] = f"not usable ({lacking}); attention in plain torch"

    def report(outcomes: Sequence[Outcome]) -> None:
        last = outcomes[-1]
        write(arguments.out, facts, outcomes)
        print(f"{last.name}: {last.status}, {last.seconds:.0f} s", flush=True)

    finished = read(arguments.resume) if arguments.resume else {}
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan.of(
            arguments.device,
            Path(folder),
            has_flashinfer=not lacking,
            kernels=arguments.kernels,
        )
        outcomes = run_all(plan.stages(), 60 * arguments.minutes - 10, report, finished)
    print(f"\n{page(facts, outcomes)}\nwritten to {arguments.out}")
    return 0 if all(outcome.status == "done" for outcome in outcomes) else 1


def parser() -> argparse.ArgumentParser:
    """The flags."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    found.add_argument("--out", type=Path, default=RESULTS, help="folder for the page and the JSON")
    found.add_argument("--minutes", type=float, default=9.0)
    found.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for a rehearsal")
    found.add_argument("--resume", type=Path, metavar="JSON", help="keep its finished stages")
    found.add_argument("--kernels", type=Path, metavar="DIR", help="copy built kernels to DIR")
    return found


if __name__ == "__main__":
    sys.exit(main())
