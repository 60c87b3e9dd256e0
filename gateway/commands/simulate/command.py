"""`podway simulate`: the serving engine in virtual time, on hardware that you describe.

Reads the flags, builds workload and setups, plays each policy at each load, and shows a table,
JSON and a plot; with --capacity it searches for the highest load within the SLO instead.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from random import Random

from rich.console import Console

from engine.errors import EngineError, InvalidRequest
from engine.simulated.capacity import capacity
from engine.simulated.figures import SLO, Figures
from engine.simulated.replay import Recording, read_recording
from engine.simulated.run import Setup, simulate
from engine.simulated.trace import (
    Arrival,
    at_rate,
    between,
    gamma,
    mean_rate,
    orca_lengths,
    poisson,
    read_trace,
    skewed_lengths,
    sped_up,
    steady,
)
from engine.simulated.verify import RecordingVerifier
from gateway.commands.flags import Parser, ShowDefaults, above_zero, positive
from gateway.commands.simulate.setups import add_engine, add_hardware, setups


def parser() -> Parser:
    """The flags of `podway simulate`."""
    parser = Parser(
        "podway simulate",
        description="Play a trace or a synthetic load through the serving engine in virtual time.",
        usage="podway simulate [flags]",
        formatter_class=ShowDefaults,
    )
    add_arguments(parser)
    return parser


def main(argv: list[str]) -> int:
    return run(parser().parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Workload, hardware, engine, results."""
    _add_workload(parser)
    add_hardware(parser)
    add_engine(parser)
    add = parser.add_argument_group("results").add_argument
    add("--slo", type=_slo, default=SLO(), metavar="ttft=S,tpot=S,norm=S,jct=S", help="of goodput")
    add("--capacity", action="store_true", help="search for the highest requests/s within --slo")
    add("--share", type=_share, default=0.9, metavar="P", help="of requests that keep the SLO")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--plot", type=Path, metavar="FILE", help="write a PNG: over load, or over time if one")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--trace", type=Path, metavar="FILE", help="CSV or Mooncake JSONL, plain or .gz")
    add("--replay", type=Path, metavar="FILE", help="what podway serve --record wrote")
    add("--lengths", choices=("orca", "skewed"), default="orca", help="without --trace")
    add("--arrivals", choices=("poisson", "gamma", "steady"), default="poisson", help="likewise")
    add("--variation", type=above_zero, default=2.0, metavar="CV", help="of gamma's gaps")
    add("--rate", type=above_zero, nargs="+", metavar="R", help="requests/s; traces are stretched")
    add("--time-scale", type=above_zero, default=1.0, metavar="X", help="play X times as fast")
    add("--from", type=float, default=0.0, dest="start", metavar="S", help="second of the trace")
    add("--to", type=float, default=float("inf"), dest="stop", metavar="S", help="likewise")
    add("-n", "--requests", type=positive, metavar="N", help="how many (default 1000, or all)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals")


def _slo(text: str) -> SLO:
    try:
        return SLO.parse(text)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    if not 0.0 < (number := float(text)) <= 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return number


def run(args: argparse.Namespace) -> int:
    """Simulate and show; 1 with one line if the flags cannot be simulated."""
    try:
        recording = read_recording(args.replay) if args.replay else None
        arrivals = _arrivals(args, recording)
        wanted = setups(args, recording)
        if args.capacity:
            runs, found = _plan(args, wanted, arrivals)
        else:
            runs, found = _sweep(args, wanted, arrivals), {}
        if recording is not None:
            runs = [*_followed(args, recording), *runs]
    except (EngineError, OSError) as error:
        sys.stderr.write(f"podway simulate: {error}\n")
        return 1
    _show(args, runs, found)
    return 0


def _sweep(
    args: argparse.Namespace, setups: Sequence[Setup], arrivals: Sequence[Arrival]
) -> list[Figures]:
    loads = [at_rate(arrivals, rate) for rate in args.rate] if args.rate else [arrivals]
    return [simulate(setup, load) for setup, load in product(setups, loads)]


def _plan(
    args: argparse.Namespace, setups: Sequence[Setup], arrivals: Sequence[Arrival]
) -> tuple[list[Figures], dict[str, float]]:
    """Every run of the searches, and the highest rate by label."""
    if args.slo == SLO():
        raise InvalidRequest("--capacity needs an --slo to stay within", "slo")
    start = args.rate[0] if args.rate else mean_rate(arrivals)
    runs: list[Figures] = []
    found: dict[str, float] = {}
    for setup in setups:
        result = capacity(setup, arrivals, lambda run: run.attainment >= args.share, start)
        runs.extend(result.runs.values())
        found[setup.label] = result.rate
    return runs, found


def _followed(args: argparse.Namespace, recording: Recording) -> list[Figures]:
    """The recorded run itself, if the schedule comes out as it was; a line says whether."""
    followed = RecordingVerifier(recording).verify(args.slo)
    count = followed.num_iterations
    if followed.figures is None:
        sys.stderr.write(f"the schedule differs after {count} iterations: {followed.difference}\n")
        return []
    sys.stdout.write(f"the schedule is reproduced: {count} iterations\n")
    return [followed.figures]


def _arrivals(args: argparse.Namespace, recording: Recording | None) -> list[Arrival]:
    """The load at its own pace, or at one request a second where only --rate sets it."""
    if recording is not None:
        if args.trace:
            raise InvalidRequest("--replay and --trace exclude each other", "replay")
        arrivals = between(recording.arrivals, args.start, args.stop)[: args.requests]
        arrivals = sped_up(arrivals, args.time_scale)
    elif args.trace:
        arrivals = between(read_trace(args.trace), args.start, args.stop)[: args.requests]
        arrivals = sped_up(arrivals, args.time_scale)
    else:
        arrivals = _synthetic(args)
    if (args.rate or args.capacity) and not mean_rate(arrivals):
        raise InvalidRequest("a rate needs arrivals at more than one moment", "rate")
    if not arrivals:
        raise InvalidRequest("nothing arrives between --from and --to", "from")
    return arrivals


def _synthetic(args: argparse.Namespace) -> list[Arrival]:
    random, count = Random(args.seed), args.requests or 1000
    lengths = orca_lengths if args.lengths == "orca" else skewed_lengths()
    if args.arrivals == "gamma":
        return gamma(args.time_scale, count, lengths, random, args.variation)
    draw = poisson if args.arrivals == "poisson" else steady
    return draw(args.time_scale, count, lengths, random)


def _show(args: argparse.Namespace, runs: Sequence[Figures], found: dict[str, float]) -> None:
    from gateway.commands.simulate.curves import (  # matplotlib is slow
        by_label,
        draw_load,
        draw_time,
        show,
    )

    console = Console()
    show(sorted(runs, key=lambda run: (run.label, run.offered)), console)
    for label, rate in found.items():
        console.print(f"{label}: {rate:.3g} requests/s with {args.share:.0%} within the SLO")
    if args.json:
        written = {"capacity": found, "runs": [run.as_json() for run in runs]}
        args.json.write_text(json.dumps(written))
    if args.plot:
        series = by_label(runs)
        if any(len(loads) > 1 for loads in series.values()):
            draw_load(series, args.plot)
        else:
            draw_time(runs, args.plot)
