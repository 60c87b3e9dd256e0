"""Agents that wait for a tool, beside clients that fill the cache, with a retention time or not.

Each agent sends a prompt of 8,192 tokens, waits five minutes for its tool and goes on behind that
prompt, while others send prompts of 2,048 tokens that fill the KV memory many times over; half of
them repeat one of 16 prompts. The costs are rounded from Llama-3.1-8B in bfloat16 on an H200
(results/gpu). Writes retention.json and README.md.

    python -m examples.benchmarks.virtual_time.retention [--out DIR]
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.iteration import Observer
from engine.policy import build
from engine.request import Caching, RequestSpec
from engine.simulated.executor import KnownCost
from engine.simulated.play import Outcome, play
from engine.simulated.run import Setup, build_executor, build_scheduler
from engine.simulated.trace import SHARED_BLOCK, Arrival
from examples.benchmarks.written import write_results

OUT = Path(__file__).parents[1] / "results" / "retention"
COST = CostModel(
    ((1, 5.1e-3), (64, 5.1e-3), (256, 7.7e-3), (512, 13e-3), (2048, 48e-3)),
    per_slot=3.3e-8,
    per_pair=5e-10,
)
SETTINGS = SchedulerSettings(
    16384, max_batch_size=256, max_batch_tokens=2048, max_prefill_slowdown=2.0
)
NUM_SLOTS = 400_000
AGENTS, WAIT, RATE = 16, 300.0, 5.0  # agents, seconds, other requests per second
PROMPT, OTHERS = 8192, 2048  # tokens
TTLS = (0.0, 300.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Sent(Arrival):
    """A request of an agent in its first or second turn, or of another client."""

    turn: int = 0
    retention: float = 0.0

    def spec(self, index: int) -> RequestSpec:
        caching = Caching(seconds=self.retention)
        tenant = "agents" if self.turn else ""
        return replace(Arrival.spec(self, index), caching=caching, tenant=tenant)


def load(num_agents: int, retention: float, seed: int = 0) -> list[Sent]:
    """The same requests whatever the retention."""
    random = Random(seed)
    found: list[Sent] = []
    names = PROMPT // SHARED_BLOCK
    for agent in range(num_agents):
        blocks = tuple(range(agent * names, (agent + 1) * names))
        at = random.uniform(0.0, 60.0)
        found.append(Sent(at, PROMPT + 1, 64, blocks, None, 1, retention))
        found.append(Sent(at + WAIT, PROMPT + 512, 64, blocks, None, 2, retention))
    at, first = 0.0, num_agents * names
    while (at := at + random.expovariate(RATE)) < WAIT + 60.0:
        start = first + random.randrange(16) * (OTHERS // SHARED_BLOCK)
        repeated = tuple(range(start, start + OTHERS // SHARED_BLOCK))
        found.append(Sent(at, OTHERS + 1, 64, repeated if random.random() < 0.5 else ()))
    return sorted(found, key=lambda one: one.at)


def run(num_agents: int, retention: float) -> dict[str, Any]:
    """The cached share of prompts and the mean TTFT of the agents' second turns, and of others."""
    arrivals = load(num_agents, retention)
    setup = Setup("", SETTINGS, lambda cost: build("fcfs", cost), COST, NUM_SLOTS)
    scheduler = build_scheduler(setup, KnownCost(COST), Observer())
    outcomes = play(scheduler, build_executor(setup, None), arrivals)
    row: dict[str, Any] = {"agents": num_agents, "retention": retention}
    for name, turn in (("second turn", 2), ("others", 0)):
        row |= {f"{name} {key}": value for key, value in _figures(outcomes, turn).items()}
    return row


def _figures(outcomes: list[Outcome], turn: int) -> dict[str, float]:
    those = [one for one in outcomes if isinstance(one.arrival, Sent) and one.arrival.turn == turn]
    tokens = sum(one.arrival.prompt_len for one in those)
    cached = sum(one.num_cached for one in those) / tokens
    return {"cached": round(cached, 4), "ttft": round(mean(one.ttft for one in those), 5)}


def page(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = [
        "# What a retention time is worth",
        "",
        "`python -m examples.benchmarks.virtual_time.retention`: virtual time, costs of",
        "Llama-3.1-8B on an H200, KV for 400,000 tokens ([JSON](retention.json)). Agents with",
        "8,192 tokens wait five minutes for a tool, while others send 5 prompts of 2,048 tokens",
        "per second, half of which repeat one of 16.",
        "",
        "| agents | `ttl` | second turn: cached | TTFT ms | others: cached | TTFT ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ttl = f"{row['retention'] / 60:g} min" if row["retention"] else "none"
        cells = [
            f"{row[f'{name} cached']:.1%} | {row[f'{name} ttft'] * 1e3:.0f}"
            for name in ("second turn", "others")
        ]
        lines.append(f"| {row['agents']} | {ttl} | {' | '.join(cells)} |")
    lines += [
        "",
        "Five minutes are not enough for a tool that takes five: the time counts from the",
        "request's arrival. Retained pages are at most half of the memory, and those that are",
        "retained first stay: 16 agents fit, of 64 the first ones.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = [run(count, ttl) for count in (AGENTS, 4 * AGENTS) for ttl in TTLS]
    write_results(args.out, rows, page)


if __name__ == "__main__":
    main()
