"""The workload of `podway simulate` and `podway plan`: a trace, a recording or a synthetic load."""

import argparse
from pathlib import Path
from random import Random

from engine.errors import InvalidRequest
from engine.simulated.replay import Recording
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
from gateway.settings.flags import above_zero, positive


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
