"""Iteration-level against request-level scheduling on this machine: two admission modes.

Serves a model once with `--admission grow` and once with `--admission request`, and sends both
the same Poisson arrivals of mixed lengths at rising rates. The figure of merit is Orca's
(section 6.2): requests a second at the same median normalised latency.

    python -m examples.benchmarks.server.iteration_against_request [MODEL] [--rates 1 2 3 4]
        [--seconds 60]
"""

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from examples.benchmarks.server.served import serving

ADMISSIONS = ("grow", "request")
Point = tuple[float, float]  # requests a second that were answered, median seconds per token


def measure(url: str, rate: float, args: argparse.Namespace, scratch: Path) -> Point:
    """One run of `podway bench` in an open loop."""
    report = scratch / "report.json"
    command = [sys.executable, "-m", "gateway", "bench", url, "--rate", str(rate)]
    command += ["-n", str(max(20, round(rate * args.seconds))), "--seed", "1"]
    command += ["--prompt-tokens", args.prompt_tokens, "--output-tokens", args.output_tokens]
    subprocess.run([*command, "--json", str(report)], check=True, stdout=subprocess.DEVNULL)
    figures = json.loads(report.read_text())
    answered = figures["num_ok"] / figures["wall_seconds"]
    return answered, figures["quantiles"]["norm"][50]


def rate_at(latency: float, points: list[Point]) -> tuple[float, bool]:
    """Requests/s at a median latency, interpolated linearly between the points; False if the
    points end before that latency, so that the rate is a lower bound."""
    for (rate0, low), (rate1, high) in pairwise(points):
        if low <= latency <= high:
            return rate0 + (rate1 - rate0) * (latency - low) / (high - low), True
    return points[-1][0], False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--rates", type=float, nargs="+", default=[5.0, 15.0, 30.0, 60.0, 90.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals, per rate")
    parser.add_argument("--prompt-tokens", default="16..128")
    parser.add_argument("--output-tokens", default="1..128")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    curves: dict[str, list[Point]] = {}
    with TemporaryDirectory() as scratch:
        for admission in ADMISSIONS:
            flags = [args.model, "--admission", admission, "--max-batch-size", "32"]
            with serving(flags) as (_, url):
                curves[admission] = [measure(url, rate, args, Path(scratch)) for rate in args.rates]
    print(f"{'offered/s':>10}" + "".join(f"{name + ' req/s, ms/token':>26}" for name in curves))
    for index, rate in enumerate(args.rates):
        cells = (curves[name][index] for name in ADMISSIONS)
        row = "".join(f"{done:16.2f}{latency * 1e3:10.1f}" for done, latency in cells)
        print(f"{rate:10.1f}{row}")
    print("\nrequests/s at equal median normalised latency")
    for request, latency in curves["request"]:
        grow, is_reached = rate_at(latency, curves["grow"])
        more = " " if is_reached else "≥"
        ratio = f"{grow / request:.2f}x"
        print(f"{latency * 1e3:8.1f} ms/token  {more}{grow:7.2f}  {request:7.2f}  {more}{ratio}")
    if args.json is not None:
        args.json.write_text(json.dumps(curves, indent=1) + "\n")


if __name__ == "__main__":
    main()
