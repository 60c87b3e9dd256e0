"""One large tenant beside four small ones, with and without `--fair-keys`, in virtual time.

Skewed lengths on one accelerator. The large tenant sends three quarters of all requests, each small
one a sixteenth; each is a client, as an API key is. Writes DIR/tenants.json; README.md of DIR is
written from it by `policies`.

    python -m examples.benchmarks.virtual_time.tenants [--seeds 5] [--requests 1000] [--out DIR]
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, quantiles

from engine.iteration import Observer
from engine.request import Request
from engine.research.leaping.run import simulate
from engine.simulated.replay import RecordedRequest
from examples.benchmarks.virtual_time.policies import (
    CASES,
    FCFS,
    System,
    arrivals_of,
    setup_of,
    with_unknown_lengths,
    write,
)
from examples.benchmarks.virtual_time.policy_tables import TenantRun, report_on, tenant_table

CASE = CASES["skewed"]
LOADS = (8, 12)  # requests/s
SHARE = 0.75  # of all requests, of the large tenant
SYSTEMS = (
    FCFS,
    replace(FCFS, name="fcfs, --fair-keys", fair_keys=True),
)


class _Ends(Observer):
    """Keeps the latencies of ended requests, by tenant."""

    def __init__(self) -> None:
        self.ttft: dict[str, list[float]] = {"large": [], "small": []}
        self.jct: dict[str, list[float]] = {"large": [], "small": []}

    def ended(self, request: Request, now: float) -> None:
        kind = "large" if request.spec.tenant == "large" else "small"
        assert request.times.ttft is not None, "every request is served to its end"
        self.ttft[kind].append(request.times.ttft)
        self.jct[kind].append(now - request.times.arrived_at)


def with_tenants(load: float, seed: int, count: int) -> list[RecordedRequest]:
    """The requests of one run, at `load` requests/s."""
    random = Random(seed)
    found = []
    for one in with_unknown_lengths(arrivals_of(CASE, load, seed, count, None), 4096):
        tenant = "large" if random.random() < SHARE else random.choice("abcd")
        assert one.params is not None, "a recorded arrival has params"
        found.append(replace(one, params=replace(one.params, tenant=tenant, client=tenant)))
    return found


def run(load: float, system: System, seed: int, arrivals: Sequence[RecordedRequest]) -> TenantRun:
    ends = _Ends()
    simulate(setup_of(CASE, system), arrivals, ends)
    found = TenantRun(
        load=load, system=system.name, seed=seed, requests=len(arrivals), large={}, small={}
    )
    for kind, latencies in (("large", found["large"]), ("small", found["small"])):
        for name, samples in (("ttft", ends.ttft[kind]), ("jct", ends.jct[kind])):
            latencies[f"{name} mean"] = fmean(samples)
            latencies[f"{name} p95"] = quantiles(samples, n=20)[18]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("examples/benchmarks/results/policies"))
    args = parser.parse_args()
    runs: list[TenantRun] = []
    for load in LOADS:
        for seed in range(1, args.seeds + 1):
            arrivals = with_tenants(load, seed, args.requests)
            runs += [run(load, system, seed, arrivals) for system in SYSTEMS]
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "tenants.json", runs)
    if (args.out / "policies.json").exists():
        (args.out / "README.md").write_text(report_on(args.out))
    print(tenant_table(runs))


if __name__ == "__main__":
    main()
