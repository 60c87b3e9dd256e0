"""`podway simulate`: the serving engine in virtual time, on hardware that you describe.

Reads the flags, builds workload and setups, plays each policy at each load, and shows a table,
JSON and a plot; with --capacity it searches for the highest load within the SLO instead.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from rich.console import Console

from engine.cost import CostModel
from engine.errors import EngineError, InvalidRequest
from engine.memory import Admission, Swap
from engine.policy import ORACLES, POLICIES, PolicySettings, build
from engine.ports import Cost, Policy
from engine.scheduler import SchedulerSettings
from engine.simulated.capacity import capacity
from engine.simulated.catalogue import DEVICES, SHAPES, described
from engine.simulated.figures import SLO, Figures
from engine.simulated.hardware import Deployment, Device, Shape
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
from gateway.client.flags import Parser, ShowDefaults, above_zero, natural, positive

T = TypeVar("T", Device, Shape)
_UNBOUNDED = 1 << 62


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
    _add_hardware(parser)
    _add_engine(parser)
    add = parser.add_argument_group("results").add_argument
    add("--slo", type=_slo, default=SLO(), metavar="ttft=S,tpot=S,norm=S,jct=S", help="of goodput")
    add("--capacity", action="store_true", help="search for the highest requests/s within --slo")
    add("--share", type=_share, default=0.9, metavar="P", help="of requests that keep the SLO")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--plot", type=Path, metavar="FILE", help="write a PNG: over load, or over time if one")


def _add_workload(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("workload").add_argument
    add("--trace", type=Path, metavar="FILE", help="CSV or Mooncake JSONL, plain or .gz")
    add("--lengths", choices=("orca", "skewed"), default="orca", help="without --trace")
    add("--arrivals", choices=("poisson", "gamma", "steady"), default="poisson", help="likewise")
    add("--variation", type=above_zero, default=2.0, metavar="CV", help="of gamma's gaps")
    add("--rate", type=above_zero, nargs="+", metavar="R", help="requests/s; traces are stretched")
    add("--time-scale", type=above_zero, default=1.0, metavar="X", help="play X times as fast")
    add("--from", type=float, default=0.0, dest="start", metavar="S", help="second of the trace")
    add("--to", type=float, default=float("inf"), dest="stop", metavar="S", help="likewise")
    add("-n", "--requests", type=positive, metavar="N", help="how many (default 1000, or all)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals")


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("hardware").add_argument
    add("--device", default="h100", help=f"JSON file, or {', '.join(DEVICES)}")
    add("--model", default="llama-3.1-8b", help=f"JSON file, or {', '.join(SHAPES)}")
    add("--stages", type=positive, default=1, metavar="N", help="of the pipeline")
    add("--ranks", type=positive, default=1, metavar="N", help="tensor ranks of each stage")
    add("--slowdown", type=above_zero, default=1.0, metavar="X", help="stretch every second")
    add("--cost", type=Path, metavar="FILE", help="measured, as serve saves it")
    add("--kv-slots", type=positive, metavar="N", help="by default what fits beside the weights")
    add("--host-kv-slots", type=natural, default=0, metavar="N", help="room for what is swapped")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    known = [*POLICIES, *ORACLES]
    add("--policy", nargs="+", choices=known, default=["fcfs"], metavar="P", help=", ".join(known))
    modes = [mode.value for mode in Admission]
    add(
        "--admission",
        nargs="+",
        choices=modes,
        default=["grow"],
        metavar="A",
        help=", ".join(modes),
    )
    add("--max-batch-size", type=positive, default=64, metavar="N", help="requests an iteration")
    add("--max-batch-tokens", type=positive, default=2048, metavar="N", help="tokens an iteration")
    add("--max-model-len", type=positive, metavar="N", help="by default the model's")
    add("--max-queue", type=positive, default=_UNBOUNDED, metavar="N", help="requests that wait")
    add("--max-preemptions", type=natural, default=3, metavar="N", help="of one request")
    swaps = [swap.value for swap in Swap]
    add(
        "--swap",
        nargs="+",
        choices=swaps,
        default=["proactive"],
        metavar="S",
        help=", ".join(swaps) + "; with --host-kv-slots",
    )
    add("--max-swaps", type=natural, default=16, metavar="N", help="of one request")
    add("--block-size", type=positive, default=16, metavar="N", help="slots of a KV block")
    add("--no-prefix-reuse", action="store_true", help="compute every prompt in full")
    add("--base-quantum", type=above_zero, metavar="S", help="mlfq: of the highest queue")
    add("--quantum-ratio", type=above_zero, default=2.0, metavar="X", help="mlfq: to the next")
    add("--no-skip-join", action="store_true", help="mlfq: everybody joins the highest queue")
    add("--starvation-seconds", type=above_zero, metavar="S", help="by default the policy's own")


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
        arrivals = _arrivals(args)
        setups = _setups(args)
        if args.capacity:
            runs, found = _plan(args, setups, arrivals)
        else:
            runs, found = _sweep(args, setups, arrivals), {}
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


def _arrivals(args: argparse.Namespace) -> list[Arrival]:
    """The load at its own pace, or at one request a second where only --rate sets it."""
    if args.trace:
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


def _setups(args: argparse.Namespace) -> list[Setup]:
    """One for each policy and admission."""
    device = _named("device", args.device, DEVICES, Device)
    shape = _named("model", args.model, SHAPES, Shape)
    hardware = Deployment(device, shape, args.stages, args.ranks, slowdown=args.slowdown)
    cost = read_cost(args.cost) if args.cost else hardware.cost()
    policies = PolicySettings(
        starvation_seconds=args.starvation_seconds,
        seats=args.max_batch_size,
        base_quantum=args.base_quantum,
        ratio=_above_one(args.quantum_ratio),
        skips=not args.no_skip_join,
    )
    return [
        Setup(
            label=f"{name} {admission}" + (f" {swap}" if len(args.swap) > 1 else ""),
            settings=_settings(args, Admission(admission), Swap(swap), shape.context),
            policy=partial(_policy, name, policies),
            cost=cost,
            num_slots=args.kv_slots or hardware.num_slots,
            block_size=args.block_size,
            stages=args.stages,
            slo=args.slo,
            num_host_slots=args.host_kv_slots,
            slot_seconds=hardware.slot_seconds,
        )
        for name, admission, swap in product(args.policy, args.admission, args.swap)
    ]


def _policy(name: str, settings: PolicySettings, cost: Cost) -> Policy:
    return build(name, cost, settings, serves=False)


def _settings(
    args: argparse.Namespace, admission: Admission, swap: Swap, context: int
) -> SchedulerSettings:
    if args.max_batch_tokens < args.max_batch_size:
        raise InvalidRequest("--max-batch-tokens must be at least --max-batch-size")
    return SchedulerSettings(
        max_model_len=args.max_model_len or context,
        max_batch_size=args.max_batch_size,
        max_batch_tokens=args.max_batch_tokens,
        admission=admission,
        max_queue_requests=args.max_queue,
        max_queue_tokens=_UNBOUNDED,
        max_preemptions=args.max_preemptions,
        swap=swap,
        max_swaps=args.max_swaps,
        reuses_prefixes=not args.no_prefix_reuse,
    )


def _above_one(ratio: float) -> float:
    if ratio <= 1.0:
        raise InvalidRequest(f"--quantum-ratio must be above 1, not {ratio}")
    return ratio


def _named(flag: str, name: str, table: dict[str, T], kind: type[T]) -> T:
    """An entry of the catalogue, or a description from a JSON file."""
    if name in table:
        return table[name]
    if not name.endswith(".json"):
        known = ", ".join(table)
        raise InvalidRequest(f"--{flag} is a .json file or one of {known}, not {name!r}", flag)
    return described(kind, _json_object(Path(name)))


def read_cost(path: Path) -> CostModel:
    """A measured cost model, bare or as `podway serve` saves it; raises `InvalidRequest`."""
    values = _json_object(path)
    try:
        return CostModel.parse(values.get("cost", values))
    except (ValueError, AttributeError) as error:
        raise InvalidRequest(f"{path} is not a cost model: {error}", "cost") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequest(f"{path} must hold a JSON object")
    return values


def _show(args: argparse.Namespace, runs: Sequence[Figures], found: dict[str, float]) -> None:
    from gateway.client.curves import by_label, draw_load, draw_time, show  # matplotlib is slow

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
