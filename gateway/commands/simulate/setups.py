"""The simulated systems and workloads of `podway simulate` and `plan`: flags for hardware and
engine, and the `Setup` of each policy, admission and swap mode. A recording has its own settings;
flags override them."""

import argparse
import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from engine.control.admission import Admission, SwapMode
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.errors import InvalidRequest
from engine.policy import POLICIES, RESEARCH, Policy, PolicySettings, build
from engine.ports import Cost
from engine.research.hardware.catalogue import (
    DEVICES,
    SHAPES,
    Deployment,
    DeviceSpec,
    ModelSpec,
    parse_spec,
)
from engine.research.policies import ORACLES
from engine.simulated.replay import Recording
from engine.simulated.run import Setup
from engine.simulated.trace import (
    Arrival,
    between,
    gamma,
    orca_lengths,
    poisson,
    read_trace,
    skewed_lengths,
    sped_up,
    steady,
    superposed,
)
from gateway.options import add_flags, options_of, with_flags, with_values
from gateway.settings.flags import above_zero, did_you_mean, natural, positive

T = TypeVar("T", DeviceSpec, ModelSpec)
UNBOUNDED = 1 << 62
_DESCRIBED = SchedulerSettings(
    max_model_len=0,
    max_batch_tokens=2048,
    max_queue_requests=UNBOUNDED,
    max_queue_tokens=UNBOUNDED,
)
_REPEATED = ("admission", "swap")  # flags with several values, a run for each


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe devices and models, or a measured cost model."""
    add = parser.add_argument_group("hardware").add_argument
    add("--device", default="h100", help=f"JSON file, or {', '.join(DEVICES)}")
    add("--model", default="llama-3.1-8b", help=f"JSON file, or {', '.join(SHAPES)}")
    add("--stages", type=positive, metavar="N", help="pipeline stages (default 1)")
    add("--ranks", type=positive, default=1, metavar="N", help="tensor ranks of each stage")
    slowdown = "multiply the time of every step"
    add("--slowdown", type=above_zero, default=1.0, metavar="X", help=slowdown)
    cost = "measured cost model, as podway serve saves it"
    add("--cost", type=Path, metavar="FILE", help=cost)
    slots = "KV cache, in tokens; by default the memory that the weights leave"
    add("--kv-slots", type=positive, metavar="N", help=slots)
    host = "KV cache in host memory for swapping, in tokens (default 0)"
    add("--host-kv-slots", type=natural, metavar="N", help=host)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the scheduler; a recording's settings are the defaults."""
    group = parser.add_argument_group("engine (with --replay, by default as recorded)")
    add = group.add_argument
    known, modes = [*POLICIES, *RESEARCH], [mode.value for mode in Admission]
    swaps = [swap.value for swap in SwapMode]
    policies = f"{', '.join(known)} (default fcfs); one run for each"
    admissions = f"{', '.join(modes)} (default grow); one run for each"
    add("--policy", nargs="+", choices=known, metavar="P", help=policies)
    add("--admission", nargs="+", choices=modes, metavar="A", help=admissions)
    swap = f"{', '.join(swaps)} (default proactive); with --host-kv-slots"
    add("--swap", nargs="+", choices=swaps, metavar="S", help=swap)
    add("--max-model-len", type=positive, metavar="N", help="by default the model's context")
    preemptions = f"preemptions of one request (default {_DESCRIBED.max_preemptions})"
    add("--max-preemptions", type=natural, metavar="N", help=preemptions)
    add("--block-size", type=positive, default=16, metavar="N", help="tokens in a KV block")
    bounds = options_of("", _DESCRIBED)
    add_flags(group, [option for option in bounds if option.name not in _REPEATED])
    add_flags(group, options_of("", PolicySettings()))


def setups(args: argparse.Namespace, recording: Recording | None) -> list[Setup]:
    """One setup for each policy, admission and swap mode. Raises `InvalidRequest`."""
    base = _described(args) if recording is None else _recorded(args, recording)
    recorded = recording.header if recording is not None else None
    names = args.policy or [recorded.policy if recorded else "fcfs"]
    modes = args.admission or [base.settings.admission.value]
    swaps = args.swap or [base.settings.swap.value]
    policies = with_flags(recorded.policies if recorded else PolicySettings(), args)
    return [
        replace(
            base,
            label=f"{name} {mode}" + (f" {swap}" if len(swaps) > 1 else ""),
            settings=replace(base.settings, admission=Admission(mode), swap=SwapMode(swap)),
            policy=partial(_policy, name, replace(policies, seats=base.settings.max_batch_size)),
            is_oracle=name in ORACLES,
        )
        for name, mode, swap in product(names, modes, swaps)
    ]


def _described(args: argparse.Namespace) -> Setup:
    """The system that the flags describe."""
    device = _named("device", args.device, DEVICES, DeviceSpec)
    shape = _named("model", args.model, SHAPES, ModelSpec)
    stages = args.stages or 1
    hardware = Deployment(device, shape, stages, args.ranks, slowdown=args.slowdown)
    tokens = max(_DESCRIBED.max_batch_tokens, args.max_batch_size or 0)
    plain = replace(_DESCRIBED, max_model_len=shape.context, max_batch_tokens=tokens)
    return Setup(
        label="",
        settings=_bounds(args, plain),
        policy=partial(_policy, "fcfs", PolicySettings()),
        cost=read_cost(args.cost) if args.cost else hardware.cost(),
        num_slots=args.kv_slots or hardware.num_slots,
        block_size=args.block_size,
        stages=stages,
        slo=args.slo,
        num_host_slots=args.host_kv_slots or 0,
        slot_seconds=hardware.slot_seconds,
    )


def _recorded(args: argparse.Namespace, recording: Recording) -> Setup:
    """The recorded server, with a cost model fitted to its iterations."""
    header = recording.header
    groups = len(header.kv.windows)
    host_slots = header.kv.num_host_blocks // groups * header.kv.block_size
    return Setup(
        label="",
        settings=_bounds(args, header.scheduler),
        policy=partial(_policy, header.policy, header.policies),
        cost=read_cost(args.cost) if args.cost else recording.cost(),
        num_slots=args.kv_slots or header.kv.num_blocks // groups * header.kv.block_size,
        block_size=header.kv.block_size,
        stages=args.stages or header.depth,
        slo=args.slo,
        lookahead=header.lookahead,
        num_host_slots=host_slots if args.host_kv_slots is None else args.host_kv_slots,
        windows=header.kv.windows,
        num_states=header.kv.num_states,
        num_host_states=header.kv.num_host_states,
    )


def _bounds(args: argparse.Namespace, bounds: SchedulerSettings) -> SchedulerSettings:
    """`bounds`, overridden by flags."""
    values = {"max_model_len": args.max_model_len, "max_preemptions": args.max_preemptions}
    options = [each for each in options_of("", bounds) if each.name not in _REPEATED]
    values |= {option.field: getattr(args, option.name) for option in options}
    try:
        return with_values(bounds, {k: value for k, value in values.items() if value is not None})
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _policy(name: str, settings: PolicySettings, cost: Cost) -> Policy:
    return build(name, cost, settings, serves=False)


def _named(flag: str, name: str, table: dict[str, T], kind: type[T]) -> T:
    """An entry of the catalogue, or a description from a JSON file."""
    if name in table:
        return table[name]
    if not name.endswith(".json"):
        known = ", ".join(table)
        nearest = did_you_mean(name, table)
        message = f"--{flag} must be a .json file or one of {known}, not {name!r}{nearest}"
        raise InvalidRequest(message, flag)
    return parse_spec(kind, _json_object(Path(name)))


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
        raise InvalidRequest(f"{path} must contain a JSON object")
    return values


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the requests."""
    add = parser.add_argument_group("workload").add_argument
    add("--trace", type=Path, metavar="FILE", help="CSV or Mooncake JSONL, plain or .gz")
    add("--replay", type=Path, metavar="FILE", help="a file that podway serve --record wrote")
    lengths = "distribution of prompt and output lengths without --trace"
    add("--lengths", choices=("orca", "skewed"), default="orca", help=lengths)
    arrivals = "arrival process without --trace"
    add("--arrivals", choices=("poisson", "gamma", "steady"), default="poisson", help=arrivals)
    variation = "coefficient of variation of gamma's gaps"
    add("--variation", type=above_zero, default=2.0, metavar="CV", help=variation)
    rate = "requests/s; one run for each; a trace is stretched to the rate"
    add("--rate", type=above_zero, nargs="+", metavar="R", help=rate)
    add("--time-scale", type=above_zero, default=1.0, metavar="X", help="replay X times as fast")
    start, stop = "first second of the trace to use", "last second of the trace to use"
    add("--from", type=float, default=0.0, dest="start", metavar="S", help=start)
    add("--to", type=float, default=float("inf"), dest="stop", metavar="S", help=stop)
    count = "number of requests (default 1000, or the whole trace)"
    add("-n", "--requests", type=positive, metavar="N", help=count)
    copies = "copies of the workload, each later by up to 60 s; they share no prefixes"
    add("--copies", type=positive, default=1, metavar="N", help=copies)
    add("--seed", type=int, default=0, metavar="N", help="seed of lengths and arrivals")


def arrivals_of(args: argparse.Namespace, recording: Recording | None = None) -> list[Arrival]:
    """The arrivals at their own times; a synthetic load has one request per second. Raises
    `InvalidRequest`."""
    if recording is not None:
        if args.trace:
            raise InvalidRequest("--replay and --trace cannot be combined", "replay")
        arrivals = between(recording.arrivals, args.start, args.stop)[: args.requests]
        arrivals = sped_up(arrivals, args.time_scale)
    elif args.trace:
        arrivals = between(read_trace(args.trace), args.start, args.stop)[: args.requests]
        arrivals = sped_up(arrivals, args.time_scale)
    else:
        arrivals = _synthetic(args)
    if args.copies > 1:
        arrivals = superposed(arrivals, args.copies, Random(args.seed))
    if not arrivals:
        raise InvalidRequest("no request arrives between --from and --to", "from")
    return arrivals


def _synthetic(args: argparse.Namespace) -> list[Arrival]:
    random, count = Random(args.seed), args.requests or 1000
    lengths = orca_lengths if args.lengths == "orca" else skewed_lengths()
    if args.arrivals == "gamma":
        return gamma(args.time_scale, count, lengths, random, args.variation)
    process = poisson if args.arrivals == "poisson" else steady
    return process(args.time_scale, count, lengths, random)
