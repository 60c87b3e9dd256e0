"""What the tuned constants of the control plane are worth: each is varied alone, in virtual time.

A row is one value of one constant in one scenario: the ratios of the figures to those with the
committed value, for the same requests, as medians over the seeds. A constant whose values all give
ratios near 1 is not worth a second thought; one with a value that is better everywhere is wrong.
Writes constants.json and README.md; runs that are already in the file are not repeated.

    python -m examples.benchmarks.virtual_time.constants [--seeds 3] [--only NAME ...] [--out DIR]
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

from engine.cost.live import LiveCost
from engine.policy import PolicySettings, build
from engine.simulated.executor import KnownCost, SimulatedExecutor, StepCost
from engine.simulated.figures import summarise
from engine.simulated.play import play_all
from engine.simulated.run import build_scheduler, recorder_of
from engine.speculation.drafter import Drafter
from engine.speculation.settings import SpeculationSettings
from examples.benchmarks.virtual_time.constant_drafts import RATIO, Drafting
from examples.benchmarks.virtual_time.constant_scenarios import (
    SCENARIOS,
    Noisy,
    Scenario,
    calibration,
    due,
)
from examples.benchmarks.written import write_results

OUT = Path(__file__).parents[1] / "results" / "constants"
FIGURES = (("ttft", "mean"), ("ttft", "p99"), ("itl", "mean"), ("itl", "p99"), ("jct", "mean"))
KEYS = ("constant", "chosen", "value", "scenario", "seeds", "late")
CLEAR = 0.02  # a ratio within 1 +- this is no difference

CONCLUSIONS = """\
- Mechanisms and constants that changed nothing are gone: waiting up to four iterations for a move
  that is not awaited (`MAX_WAITS`; 0 is without it), making room only for requests whose next
  scheduled time is half as far (`CLEARLY`; 1 is without it), the margin of the learned cost that
  was renewed every 32 steps (`REFRESH`; now with each), the position at which `mlfq` measured
  attention (`FAR`; now the next one), an age of its own of what was learned (`UNUSED`; now
  `RECENT`), and a bound on how long a request with a draft model is expected to go on
  (`EXPECTED_TOKENS`; now half of what it may).
- Calibrations with a longer context are twice as good in the same time (`LONG` 4096), so it is now
  what `--max-batch-tokens` allows. The other rows of calibration were measured before.
- What decides is the bound on prompts beside decodes: that it grows with the age of a prompt
  (`MAX_GROWTH` 1 and `PATIENCE` 1e9 are without it) is worth several times the mean TTFT near a
  CPU's capacity. Both were swept again when the growth began to depend on a prompt's time alone;
  the other rows of step_time are from before, when it began half a second later.
- A larger least share (`MIN_SHARE` 0.3) has a lower TTFT and a higher p99 of the ITL on a
  GPU: a choice between the two, not an optimum. A least piece of 64
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
  Where the machine was not measured, the first fit decides (`FIRST_FIT` 1e18 is without any).
- A state of recurrent layers every 1,024 tokens (`SNAPSHOT_TOKENS`) is where it should be: four
  times as many or as few cost half as much TTFT again, and none within a prompt double it. One
  saved block in an iteration (`SAVES_PER_STEP`) is too few.
- Of speculation the bound on iterations with decodes that gain nothing (`MAX_SLOWDOWN`) and waiting
  for likely drafts (`MIN_EXPECTED`) matter for text that is edited, and how many positions are
  compared (`TRIES`) for text that recurs. Those of the budget change nothing here, where guesses
  take no time of the event loop and few are in vain; figures of a single seed vary by some percent.

Rows of speculation, of `WEIGHT`, `WINDOW`, `RECENT`, `FIRST_FIT` and `FITS_APART`, and of the limit
of starving are of one seed. Rows are measured once, so those of a constant are older than what has
changed since. Not swept here: `PIECE_TIMES` ([least piece](../least_piece/README.md)),
`STARVATION_SECONDS` of `mlfq` ([policies](../policies/README.md)), and what says `fixed:` in its
comment: formats, units, limits of memory or of the event loop's time."""


@dataclass(frozen=True, slots=True)
class Swept:
    """A constant, the values that are tried, and where; other modules import it, `also`."""

    module: str
    name: str
    values: tuple[float, ...]
    scenarios: tuple[str, ...]
    also: tuple[str, ...] = ()

    @property
    def chosen(self) -> float:
        value: float = getattr(import_module(f"engine.{self.module}"), self.name)
        return value

    @contextmanager
    def set_to(self, value: float) -> Iterator[None]:
        """The constant has this value meanwhile."""
        with ExitStack() as stack:
            for module in (self.module, *self.also):
                stack.enter_context(
                    patch.object(import_module(f"engine.{module}"), self.name, value)
                )
            yield


PIECES = ("chat", "chat, GPU", "burst")
GOALS = ("goal", "goal, GPU")
LEARNING = ("learning", "learning, goal")
SWAPPING = ("swaps", "swaps, chat")
DRAFTING = ("edit", "draft model")
CALIBRATION = "calibration"
# Measured before they were removed: a value stands for what they did not do
REMOVED = (
    "control.swap_planner.MAX_WAITS",
    "control.swap_planner.CLEARLY",
    "policy.mlfq.FAR",
    "cost.live.REFRESH",
    "cost.live.UNUSED",
    "cost.profiler.LONG",
    "speculation.draft_model.EXPECTED_TOKENS",
)
SWEPT = (
    Swept("control.step_time", "MIN_PIECE", (1, 4, 64), (*PIECES, *GOALS)),
    Swept("control.step_time", "MIN_FIRST_PIECE", (1, 16, 64), PIECES),
    Swept("control.step_time", "MIN_SHARE", (0.0, 0.03, 0.3), (*PIECES, *GOALS)),
    Swept("control.step_time", "PROMPT_SHARE", (0.0, 0.1, 0.5, 1.0), PIECES),
    Swept("control.step_time", "PATIENCE", (1.0, 4.0, 8.0, 1e9), PIECES),
    Swept("control.step_time", "MAX_GROWTH", (1.0, 1.5, 4.0), PIECES),
    Swept("control.step_time", "MIN_BATCH_SECONDS", (1.0, 3.0), GOALS),
    Swept("control.swap_planner", "DECAY", (0.0, 0.9, 0.999), SWAPPING),
    Swept("control.swap_planner", "MAX_SPARE", (0.0, 0.1, 0.5), SWAPPING),
    Swept("control.scheduler", "SAVES_PER_STEP", (1, 64), ("sessions, host",)),
    Swept("kv.request_states", "SNAPSHOT_TOKENS", (256, 4096, 1 << 30), ("sessions, states",)),
    Swept("kv.prefix_search", "MIN_COMMON", (16, 256, 1024, 1e9), ("sessions", "forks")),
    Swept("policy.mlfq", "MAX_PLACES", (16, 128), SWAPPING),
    Swept(
        "policy.waiting", "STARVATION_SECONDS", (15, 240), ("deadlines",), also=("policy.deadline",)
    ),
    Swept("policy.waiting", "MAX_AT_ONCE", (1, 16), ("deadlines",), also=("policy.deadline",)),
    Swept("policy.forecast", "MAX_SAMPLED", (4, 16, 1024), ("deadlines",)),
    Swept("cost.live", "RECENT", (64, 4096), LEARNING),
    Swept("cost.live", "MAX_MARGIN", (1.0, 1.2, 3.0), LEARNING),
    Swept("cost.live", "QUANTILE", (0.5, 0.75, 0.99), LEARNING),
    Swept(
        "cost.live",
        "NEWS_SHARE",
        (0.02, 0.3, 1.0),
        ("deadlines", *DRAFTING),
        also=("policy.forecast", "speculation.budget", "speculation.draft_model"),
    ),
    Swept("cost.live", "WEIGHT", (0.02, 0.1), LEARNING),
    Swept("cost.live", "DECODES", (4, 128), LEARNING),
    Swept("cost.live", "WINDOW", (1, 15), ("learning",)),
    Swept("cost.live", "MAX_ERROR", (2.0, 16.0), LEARNING),
    Swept("cost.live", "SMALL_ERROR", (0.1, 0.5, 10.0), LEARNING),
    Swept("cost.live", "FASTER", (1.0, 8.0), LEARNING),
    Swept("cost.live", "MIN_SHARE", (0.0, 0.2), LEARNING),
    Swept("cost.live", "SETTLING", (5, 80), LEARNING),
    Swept("cost.live", "SETTLED_ERROR", (0.005, 0.08), LEARNING),
    Swept("cost.live", "REST", (0, 31), LEARNING),
    Swept("cost.live", "FIRST_FIT", (16, 256, 1 << 60), ("unmeasured",)),
    Swept("cost.live", "FITS_APART", (1, 16), ("unmeasured",)),
    Swept("cost.fit", "_PASSES", (1, 8), (CALIBRATION,)),
    Swept("cost.fit", "_PENALTY", (0.003, 0.3), (CALIBRATION,)),
    Swept("cost.profiler", "MAX_REPEATS", (3, 9), (CALIBRATION,)),
    Swept("cost.profiler", "REPEAT_SHARE", (0.001, 0.02), (CALIBRATION,)),
    Swept("cost.profiler", "MAX_ROUNDS", (1, 6), (CALIBRATION,)),
    Swept("cost.profiler", "SAME", (0.02, 0.3), (CALIBRATION,)),
    Swept("cost.profiler", "GROWTH", (2, 8), (CALIBRATION,)),
    Swept("cost.profiler", "SHORT", (1, 128), (CALIBRATION,)),
    Swept("speculation.acceptance", "WEIGHT", (1.0, 16.0), DRAFTING),
    Swept("speculation.acceptance", "MEMORY", (0.9, 0.9999), DRAFTING),
    Swept("speculation.acceptance", "OWN_MEMORY", (0.5, 0.99), DRAFTING),
    Swept("speculation.acceptance", "MIN_PROBABILITY", (0.0, 0.1), DRAFTING),
    Swept("speculation.budget", "SHARE", (0.0, 0.03), DRAFTING),
    Swept("speculation.budget", "FIRST_STEPS", (0.0, 16.0), DRAFTING),
    Swept("speculation.budget", "MAX_STEPS", (4.0, 64.0), DRAFTING),
    Swept(
        "speculation.budget",
        "ASK_SECONDS",
        (5e-6, 5e-4),
        DRAFTING,
        also=("speculation.draft_model",),
    ),
    Swept(
        "speculation.budget",
        "DRAFT_SECONDS",
        (1e-6, 1e-4),
        DRAFTING,
        also=("speculation.draft_model",),
    ),
    Swept("speculation.budget", "USUAL_DRAFTS", (2.0, 32.0), DRAFTING),
    Swept("speculation.budget", "WARM_UPS", (0, 8), DRAFTING),
    Swept("speculation.draft_model", "MIN_PIECE", (8, 128), ("draft model",)),
    Swept("speculation.draft_model", "PROBE_DRAFTS", (1, 4), ("draft model",)),
    Swept("speculation.draft_model", "FIRST_PROBES", (0, 24), ("draft model",)),
    Swept("speculation.draft_model", "MAX_PROBED", (64, 4096), ("draft model",)),
    Swept("speculation.draft_model", "MAX_CREDIT", (0.1, 10.0), ("draft model",)),
    Swept("speculation.drafter", "CHECK_EVERY", (1, 64), DRAFTING),
    Swept("speculation.drafter", "MAX_PAUSE", (1, 255), DRAFTING),
    Swept("speculation.gain", "MIN_GAIN", (1.0, 1.1), DRAFTING),
    Swept("speculation.gain", "MAX_SLOWDOWN", (1.0, 2.0), DRAFTING),
    Swept("speculation.guesses", "MIN_EXPECTED", (0.1, 1.0), DRAFTING),
    Swept(
        "speculation.settings",
        "LOOKUP_MIN",
        (1, 4),
        ("edit", "again"),
        also=("speculation.prediction",),
    ),
    Swept(
        "speculation.settings",
        "LOOKUP_MAX",
        (8, 64),
        ("edit", "again"),
        also=("speculation.prediction",),
    ),
    Swept("speculation.token_index", "TRIES", (1, 64), ("again",)),
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
        cost = LiveCost(scenario.believed)
        machine = Noisy(setup.cost, Random(seed))
    drafter, executor = None, None
    if scenario.speculation:
        how = SpeculationSettings.parse(scenario.speculation)
        drafter = Drafter.build(how, cost, RATIO)
        executor = Drafting(setup.cost, Random(seed), setup.lookahead)
    scheduler = build_scheduler(setup, cost, recorder, drafter)
    recorder.watch(scheduler)
    if executor is None:
        block_seconds = setup.slot_seconds * setup.block_size
        plain = SimulatedExecutor(machine, block_seconds=block_seconds)
        played = play_all(scheduler, plain, arrivals)
    else:
        played = play_all(scheduler, executor, arrivals, executor.accepted, setup.lookahead)
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
        with swept.set_to(value):
            now = figures(name, seed)
        runs.append(
            {
                key: figure - before[key] if key == "late" else figure / before[key]
                for key, figure in now.items()
            }
        )
    return {key: round(median(run[key] for run in runs), 4) for key in runs[0]}


@cache
def committed(name: str, seed: int) -> dict[str, float]:
    return figures(name, seed)


def figures(name: str, seed: int) -> dict[str, float]:
    return calibration(seed) if name == CALIBRATION else play(SCENARIOS[name], seed)


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
                }
                row = next((one for one in known if key.items() <= one.items()), None)
                if row is None and (not only or swept.name in only):
                    row = key | {"seeds": seeds} | ratios(swept, value, name, seeds)
                if row is not None:
                    yield row
    yield from [one for one in known if one["constant"] in REMOVED]


def _text(row: dict[str, Any]) -> str:
    """The figures of a row that differ clearly from the committed value's."""
    names = [name for name in row if name not in KEYS]
    told = [f"{name} {row[name]:.2f}" for name in names if abs(row[name] - 1.0) > CLEAR]
    if abs(row.get("late", 0.0)) > CLEAR / 2:
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
        f"Medians of {found[0]['seeds']} seeds, if not said below; those within {CLEAR:.0%} are",
        "left out. Costs are rounded from a CPU (0.5B in int8) and a GPU (8B in bfloat16).",
        "*late*: the share of requests without a first token before its deadline.",
        "",
        "| scenario | what |",
        "|---|---|",
        *(f"| {name} | {scenario.about} |" for name, scenario in SCENARIOS.items()),
        f"| {CALIBRATION} | the start of a server on a noisy GPU: error of the model, seconds |",
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
    write_results(args.out, found, page)


if __name__ == "__main__":
    main()
