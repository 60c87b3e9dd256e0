"""What the tuned constants of the control plane are worth: each is varied alone, in virtual time.

A row is one value of one constant in one scenario: the ratios of the figures to those with the
committed value, for the same requests, as medians over the seeds. A constant whose values all give
ratios near 1 is not worth a second thought; one with a value that is better everywhere is wrong.
Writes constants.json and README.md; runs that are already in the file are not repeated.

    python -m examples.benchmarks.virtual_time.constants [--seeds 3] [--only NAME ...] [--out DIR]
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import groupby
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.policy import PolicySettings, build
from engine.request import RequestSpec
from engine.research.hardware.catalogue import DEVICES, SHAPES
from engine.research.hardware.deployment import Deployment
from engine.simulated.executor import SimulatedExecutor, StepCost
from engine.simulated.figures import summarise
from engine.simulated.known_cost import KnownCost
from engine.simulated.play import play_all
from engine.simulated.run import Setup, build_scheduler, recorder_of
from engine.simulated.trace import (
    SHARED_BLOCK,
    Arrival,
    at_rate,
    poisson,
    read_trace,
    skewed_lengths,
)
from engine.step import Step

OUT = Path(__file__).parents[1] / "results" / "constants"
DATA = Path(__file__).parents[3] / "tests" / "data"
FIGURES = (("ttft", "mean"), ("ttft", "p99"), ("itl", "mean"), ("itl", "p99"), ("jct", "mean"))
NAMES = (*(f"{name} {point}" for name, point in FIGURES), "late")
CLEAR = 0.02  # a ratio within 1 +- this is no difference

# Rounded from calibrations: Qwen2.5-0.5B in int8 on two cores, Llama-3.1-8B in bfloat16 on a GPU
CPU = CostModel(
    ((1, 0.022), (8, 0.036), (32, 0.07), (128, 0.12), (512, 0.4), (2048, 1.6)),
    per_slot=4e-8,
    per_pair=2e-8,
    per_draw=1e-5,
)
GPU = CostModel(
    ((1, 5.1e-3), (64, 5.1e-3), (128, 5.7e-3), (256, 7.7e-3), (512, 13e-3), (2048, 48e-3)),
    per_slot=3.3e-8,
    per_pair=5e-10,
    per_draw=2e-6,
    per_piece=7e-3,
)
BASE = SchedulerSettings(max_model_len=16384, max_prefill_slowdown=2.0)


@dataclass(frozen=True, slots=True)
class Urgent(Arrival):
    """A request whose first token is due within seconds that grow with its prompt."""

    def spec(self, index: int) -> RequestSpec:
        return replace(Arrival.spec(self, index), ttft_deadline=2.0 + 0.004 * self.prompt_len)


CONCLUSIONS = """\
- Two mechanisms changed nothing, whatever their constant, and are gone: waiting up to four
  iterations for a move that is not awaited (`MAX_WAITS`; 0 is without it), and making room only for
  requests whose next scheduled time is half as far (`CLEARLY`; 1 is without it).
- What decides is the bound on prompts beside decodes: that it grows with the age of a prompt
  (`MAX_GROWTH` 1 and `PATIENCE` 1e9 are without it) is worth 7 times the mean TTFT near a CPU's
  capacity; a growth of 4 costs half as much again at p99 of the ITL.
- A larger least share and an earlier growth (`MIN_SHARE` 0.3, `PATIENCE` 0.1) have a lower TTFT and
  a higher p99 of the ITL on a GPU: a choice between the two, not an optimum. A least piece of 64
  tokens (`MIN_FIRST_PIECE`) is better near this CPU's capacity, but is 0.6 s long on one that needs
  10 ms for a token: so the share is one of time. `PROMPT_SHARE` 1 is better in the burst and lets
  one client with many prompts multiply everybody's ITL (results/attacks).
- Waiting for a common prefix that is being computed (`MIN_COMMON` 1e9 is without it) is worth an
  eighth of the mean TTFT of forks and a fifth of its p99; from 16 to 256 tokens its threshold does
  not matter.
- The spare blocks of proactive swapping (`MAX_SPARE` 0 is without them) are worth up to a tenth of
  p99 of the ITL.
- Of the learned cost model the margin (`MAX_MARGIN`, `QUANTILE`) trades TTFT for keeping the goal,
  and outliers matter (`FASTER`, `SMALL_ERROR`); the others are within the noise, about 5 %.
  `UNUSED` is for calibrations that are wrong by orders of magnitude, which are not played here.

Not swept here: bounds of the event loop's time (blocks hashed, keys compared or tokens indexed at a
time), `PIECE_TIMES` ([least piece](../least_piece/README.md)), `STARVATION_SECONDS`
([policies](../policies/README.md)), and constants of calibration and of speculation, which need a
real machine ([speculation](../speculation/README.md))."""


def due(arrival: Arrival) -> float:
    """Seconds after which its first token is late."""
    deadline = arrival.spec(0).ttft_deadline
    return inf if deadline is None else deadline


class Noisy:
    """A machine that takes a varying multiple of what the cost model says (`StepCost`): log-normal
    with a deviation of 10 %, and ten times as long in one iteration of two hundred."""

    def __init__(self, cost: CostModel, random: Random) -> None:
        self._cost = cost
        self._random = random

    def step(self, step: Step) -> float:
        stall = 10.0 if self._random.random() < 0.005 else 1.0
        return self._cost.step(step) * self._random.lognormvariate(0.0, 0.1) * stall

    def idle(self, num_entries: int) -> float:
        return self._cost.idle(num_entries)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load on a machine. `believed`: the model that the scheduler begins with is off by this
    factor and learns from a noisy machine; None: it knows the machine."""

    about: str
    setup: Setup
    policy: str = "fcfs"
    believed: float | None = None

    def arrivals(self, seed: int) -> Sequence[Arrival]:
        return ARRIVALS[self.setup.label](seed)


def _chat(rate: float, count: int, seed: int) -> list[Arrival]:
    """Azure's conversations: lengths of the trace, in another order for each seed."""
    trace = read_trace(DATA / "azure_2023_conv_first_1000.csv.gz")
    lengths = [(arrival.prompt_len, arrival.output_len) for arrival in trace]
    return poisson(rate, count, lambda random: random.choice(lengths), Random(seed))


def _burst(seed: int) -> list[Arrival]:
    """Four streams, and ten seconds later 60 requests within one."""

    def short(random: Random) -> tuple[int, int]:
        return random.randint(16, 512), random.randint(64, 256)

    random = Random(seed)
    few = poisson(4.0, 4, lambda _: (64, 1500), random)
    many = [replace(one, at=10.0 + one.at) for one in poisson(60.0, 60, short, random)]
    late = [replace(one, at=70.0 + one.at) for one in poisson(0.5, 10, short, random)]
    return [*few, *many, *late]


def _sessions(seed: int) -> list[Arrival]:
    """Sessions of the Mooncake trace: long prompts that go on where earlier ones ended."""
    trace = [
        replace(one, prompt_len=min(one.prompt_len, 12_000))
        for one in read_trace(DATA / "mooncake_conversation_sessions.jsonl.gz")
        if one.prompt_len <= 60_000
    ]
    first = Random(seed).randrange(len(trace) // 3)
    return at_rate(trace[first:], 3.0)


def _forks(seed: int) -> list[Arrival]:
    """Agents that fork: eight requests within 20 ms share 512 to 4,096 tokens and differ in
    the last 16 to 512."""
    random = Random(seed)
    found: list[Arrival] = []
    for at in range(0, 40 * 5, 5):
        shared = SHARED_BLOCK * random.randint(1, 8)
        blocks = tuple([8 * at + number for number in range(shared // SHARED_BLOCK)])
        for gap in sorted(random.random() for _ in range(8)):
            length = shared + random.randint(16, 512)
            found.append(Arrival(at + 0.02 * gap, length, random.randint(16, 128), blocks))
    return found


ARRIVALS: dict[str, Callable[[int], Sequence[Arrival]]] = {
    "chat": lambda seed: _chat(0.5, 250, seed),
    "chat, GPU": lambda seed: _chat(14.0, 1000, seed),
    "goal": lambda seed: _chat(0.5, 250, seed),
    "goal, GPU": lambda seed: _chat(14.0, 1000, seed),
    "burst": _burst,
    "swaps": lambda seed: poisson(16.0, 800, skewed_lengths(), Random(seed)),
    "swaps, chat": lambda seed: _chat(8.0, 800, seed),
    "sessions": _sessions,
    "forks": _forks,
    "deadlines": lambda seed: [
        Urgent(one.at, one.prompt_len, one.output_len) for one in _chat(1.2, 400, seed)
    ],
    "learning": lambda seed: _chat(0.5, 250, seed),
    "learning, goal": lambda seed: _chat(0.5, 250, seed),
}


def _setup(name: str, cost: CostModel = CPU, slots: int = 400_000, **changes: Any) -> Setup:
    settings = replace(BASE, **changes)
    return Setup(name, settings, lambda cost: build("fcfs", cost), cost, slots)


GPU_SETTINGS = {"max_batch_size": 256, "max_batch_tokens": 2048}


def _with_host_tier(name: str, model: str, seats: int) -> Setup:
    """A model on an A100 with 40 GB as in results/fastserve, and 128 GiB of host memory."""
    machine = Deployment(DEVICES["a100-40gb"], SHAPES[model])
    bounds = {"max_batch_size": seats, "reuses_prefixes": False}
    return replace(
        _setup(name, machine.cost(), machine.num_slots, **bounds),
        num_host_slots=int(128 * 2**30 / machine.shape.kv_bytes),
        slot_seconds=machine.slot_seconds,
    )


SCENARIOS = {
    "chat": Scenario("conversations on a CPU", _setup("chat")),
    "chat, GPU": Scenario(
        "conversations on a GPU", _setup("chat, GPU", GPU, 400_000, **GPU_SETTINGS)
    ),
    "goal": Scenario("an ITL goal of 100 ms", _setup("goal", itl_goal=0.1)),
    "goal, GPU": Scenario(
        "an ITL goal of 25 ms", _setup("goal, GPU", GPU, itl_goal=0.025, **GPU_SETTINGS)
    ),
    "burst": Scenario("60 requests in a second beside 4 streams", _setup("burst")),
    "swaps": Scenario(
        "FastServe's load: Zipf lengths at 16/s, 13B on an A100, a host tier",
        _with_host_tier("swaps", "gpt3-13b", 16),
        "mlfq",
    ),
    "swaps, chat": Scenario(
        "conversations at 8/s, 8B on an A100, a host tier",
        _with_host_tier("swaps, chat", "llama-3.1-8b", 64),
        "mlfq",
    ),
    "sessions": Scenario("agents' sessions with long prefixes", _setup("sessions", GPU, 200_000)),
    "forks": Scenario("forks: eight at once share a prompt", _setup("forks", GPU, **GPU_SETTINGS)),
    "deadlines": Scenario(
        "a deadline for each first token, more load than capacity", _setup("deadlines"), "deadline"
    ),
    "learning": Scenario(
        "a model twice too fast, a noisy machine", _setup("learning"), "fcfs", 0.5
    ),
    "learning, goal": Scenario(
        "a model half too slow, a noisy machine, an ITL goal of 150 ms",
        _setup("learning, goal", itl_goal=0.15),
        "fcfs",
        1.5,
    ),
}


@dataclass(frozen=True, slots=True)
class Swept:
    """A constant, the values that are tried, and where."""

    module: str
    name: str
    values: tuple[float, ...]
    scenarios: tuple[str, ...]

    @property
    def chosen(self) -> float:
        value: float = getattr(import_module(f"engine.{self.module}"), self.name)
        return value


PIECES = ("chat", "chat, GPU", "burst")
GOALS = ("goal", "goal, GPU")
LEARNING = ("learning", "learning, goal")
SWAPPING = ("swaps", "swaps, chat")
# Measured before they were removed: 0 and 1 stand for what they did not do
REMOVED = ("control.swap_planner.MAX_WAITS", "control.swap_planner.CLEARLY")
SWEPT = (
    Swept("control.step_time", "MIN_PIECE", (1, 4, 64), (*PIECES, *GOALS)),
    Swept("control.step_time", "MIN_FIRST_PIECE", (1, 16, 64), PIECES),
    Swept("control.step_time", "MIN_SHARE", (0.0, 0.03, 0.3), (*PIECES, *GOALS)),
    Swept("control.step_time", "PROMPT_SHARE", (0.0, 0.1, 0.5, 1.0), PIECES),
    Swept("control.step_time", "PATIENCE", (0.1, 2.0, 8.0, 1e9), PIECES),
    Swept("control.step_time", "MAX_GROWTH", (1.0, 1.5, 4.0), PIECES),
    Swept("control.step_time", "MIN_BATCH_SECONDS", (1.0, 3.0), GOALS),
    Swept("control.swap_planner", "DECAY", (0.0, 0.9, 0.999), SWAPPING),
    Swept("control.swap_planner", "MAX_SPARE", (0.0, 0.1, 0.5), SWAPPING),
    Swept("kv.prefix_search", "MIN_COMMON", (16, 256, 1024, 1e9), ("sessions", "forks")),
    Swept("policy.mlfq", "FAR", (512, 32768), SWAPPING),
    Swept("policy.mlfq", "MAX_PLACES", (16, 128), SWAPPING),
    Swept("policy.deadline", "MAX_LATE", (1, 16), ("deadlines",)),
    Swept("policy.forecast", "MAX_SAMPLED", (4, 16, 1024), ("deadlines",)),
    Swept("policy.forecast", "WEIGHT", (0.02, 0.3, 1.0), ("deadlines",)),
    Swept("cost.errors", "RECENT", (64, 4096), LEARNING),
    Swept("cost.errors", "REFRESH", (1, 256), LEARNING),
    Swept("cost.errors", "MAX_MARGIN", (1.0, 1.2, 3.0), LEARNING),
    Swept("cost.errors", "QUANTILE", (0.5, 0.75, 0.99), LEARNING),
    Swept("cost.live", "DECODES", (4, 128), LEARNING),
    Swept("cost.live", "MAX_ERROR", (2.0, 16.0), LEARNING),
    Swept("cost.live", "SMALL_ERROR", (0.1, 0.5, 10.0), LEARNING),
    Swept("cost.live", "FASTER", (1.0, 8.0), LEARNING),
    Swept("cost.live", "MIN_SHARE", (0.0, 0.2), LEARNING),
    Swept("cost.live", "UNUSED", (32, 2048, 1e9), LEARNING),
    Swept("cost.live", "SETTLING", (5, 80), LEARNING),
    Swept("cost.live", "SETTLED_ERROR", (0.005, 0.08), LEARNING),
    Swept("cost.live", "REST", (0, 31), LEARNING),
)


def play(scenario: Scenario, seed: int) -> dict[str, float]:
    """The figures of one run: seconds, and the share of requests without a first token in time."""
    arrivals, setup = scenario.arrivals(seed), scenario.setup
    settings = PolicySettings(seats=setup.settings.max_batch_size)
    setup = replace(setup, policy=lambda cost: build(scenario.policy, cost, settings))
    recorder = recorder_of(arrivals)
    cost: LiveCost = KnownCost(setup.cost)
    machine: StepCost = setup.cost
    if scenario.believed is not None:
        curve = tuple((size, scenario.believed * seconds) for size, seconds in setup.cost.curve)
        cost = LiveCost(replace(setup.cost, curve=curve))
        machine = Noisy(setup.cost, Random(seed))
    scheduler = build_scheduler(setup, cost, recorder)
    recorder.watch(scheduler)
    executor = SimulatedExecutor(machine, block_seconds=setup.slot_seconds * setup.block_size)
    played = play_all(scheduler, executor, arrivals)
    found = summarise(setup.label, played, recorder, setup.slo)
    figures = {f"{name} {point}": found.at(name, point) or 0.0 for name, point in FIGURES}
    late = [one for one in played.outcomes if one.ttft > due(one.arrival)]
    return figures | {"late": (len(late) + len(played.lost)) / len(arrivals)}


def ratios(swept: Swept, value: float, name: str, seeds: int) -> dict[str, float]:
    """Each figure with this value, as a multiple of that with the committed one; "late" has the
    difference of the shares. Medians over the seeds."""
    runs = []
    for seed in range(seeds):
        before = committed(name, seed)
        with patch.object(import_module(f"engine.{swept.module}"), swept.name, value):
            now = play(SCENARIOS[name], seed)
        late = now.pop("late") - before["late"]
        runs.append({key: now[key] / before[key] for key in now} | {"late": late})
    return {key: round(median(run[key] for run in runs), 4) for key in runs[0]}


@cache
def committed(name: str, seed: int) -> dict[str, float]:
    return play(SCENARIOS[name], seed)


def rows(
    known: Sequence[dict[str, Any]], only: Sequence[str], seeds: int
) -> Iterator[dict[str, Any]]:
    """A row for each value of each constant in each of its scenarios; known ones are kept."""
    for swept in SWEPT:
        for value in swept.values:
            for name in swept.scenarios:
                key = {
                    "constant": f"{swept.module}.{swept.name}",
                    "chosen": swept.chosen,
                    "value": value,
                    "scenario": name,
                    "seeds": seeds,
                }
                row = next((one for one in known if key.items() <= one.items()), None)
                if row is None and (not only or swept.name in only):
                    row = key | ratios(swept, value, name, seeds)
                if row is not None:
                    yield row
    yield from [one for one in known if one["constant"] in REMOVED]


def _text(row: dict[str, Any]) -> str:
    """The figures of a row that differ clearly from the committed value's."""
    told = [f"{name} {row[name]:.2f}" for name in NAMES[:-1] if abs(row[name] - 1.0) > CLEAR]
    if abs(row["late"]) > CLEAR / 2:
        told.append(f"late {row['late']:+.1%}")
    return ", ".join(told)


def page(found: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [
        "# What the tuned constants of the control plane are worth",
        "",
        "`python -m examples.benchmarks.virtual_time.constants`: each constant is varied alone,",
        "in virtual time, with the production scheduler ([JSON](constants.json)). Figures are",
        "multiples of those with the committed value for the same requests: below 1 is better.",
        f"Medians of {found[0]['seeds']} seeds; those within {CLEAR:.0%} are left out. Costs are",
        "rounded from a CPU (0.5B in int8) and a GPU (8B in bfloat16). *late*: the share of",
        "requests without a first token before its deadline.",
        "",
        "| scenario | what |",
        "|---|---|",
        *(f"| {name} | {scenario.about} |" for name, scenario in SCENARIOS.items()),
        "",
        "| constant | committed | value | scenario | multiples |",
        "|---|---|---|---|---|",
    ]
    for constant, rows_of in groupby(found, lambda row: (row["constant"], row["chosen"])):
        alike: dict[float, list[str]] = {}
        for row in rows_of:
            where = f"| {constant[0]} | {constant[1]:g} | {row['value']:g} |"
            if _text(row):
                lines.append(f"{where} {row['scenario']} | {_text(row)} |")
            else:
                alike.setdefault(row["value"], []).append(row["scenario"])
        for value, names in alike.items():
            where = f"| {constant[0]} | {constant[1]:g} | {value:g} |"
            lines.append(f"{where} {'; '.join(names)} | no difference |")
    lines += ["", *CONCLUSIONS.splitlines()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "constants.json"
    known = json.loads(file.read_text()) if file.exists() else []
    found: list[dict[str, Any]] = []
    for row in rows(known, args.only, args.seeds):
        found.append(row)
        print(
            row["constant"],
            row["value"],
            row["scenario"],
            _text(row) or "no difference",
            flush=True,
        )
    file.write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "README.md").write_text(page(found))


if __name__ == "__main__":
    main()
