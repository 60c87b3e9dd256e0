"""The machines, loads and scenarios in which the constants of the control plane are varied."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from engine.control.settings import SchedulerSettings
from engine.cost.model import UNMEASURED, CostModel
from engine.cost.profiler import Probe, ProbeLimits, measure
from engine.policy import build
from engine.request import RequestSpec
from engine.research.hardware.catalogue import DEVICES, SHAPES, Deployment
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.run import Setup
from engine.simulated.trace import (
    SHARED_BLOCK,
    Arrival,
    at_rate,
    poisson,
    read_trace,
    skewed_lengths,
)
from engine.simulated.virtual_loop import run_virtual
from engine.step import Step
from examples.benchmarks.virtual_time.constant_drafts import edits, modelled, repeats

DATA = Path(__file__).parents[3] / "tests" / "data"

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
    """A load on a machine. `believed`: the model that the scheduler begins with, which learns from
    a noisy machine; None: it knows the machine. `speculation`: as in vLLM's setting."""

    about: str
    setup: Setup
    policy: str = "fcfs"
    believed: CostModel | None = None
    speculation: Mapping[str, object] | None = None

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
    "unmeasured": lambda seed: _chat(4.0, 100, seed),
    "sessions, host": lambda seed: _sessions(seed)[:120],
    "sessions, states": _sessions,
    "edit": lambda seed: edits(_short(0.5, seed), Random(seed)),
    "again": lambda seed: repeats(_short(0.5, seed), Random(seed)),
    "draft model": lambda seed: modelled(_short(0.3, seed, 6), Random(seed)),
}


def _short(rate: float, seed: int, octaves: int = 10) -> list[Arrival]:
    """Prompts of 1 to 2**octaves tokens, answers of 50 to 300."""

    def lengths(random: Random) -> tuple[int, int]:
        return int(2 ** (octaves * random.random())), random.randint(50, 300)

    return poisson(rate, 15, lengths, Random(seed))


def calibration(seed: int) -> dict[str, float]:
    """How far models that were measured on 20 noisy GPUs are off, and the seconds that it took;
    means."""
    found = [_calibrated(20 * seed + number) for number in range(20)]
    return {name: sum(one[name] for one in found) / 20 for name in found[0]}


def _calibrated(seed: int) -> dict[str, float]:
    limits = ProbeLimits(256, 2048, 8192, 8192, 16)
    executor = SimulatedExecutor(Noisy(GPU, Random(seed)))

    async def run() -> tuple[CostModel, float]:
        clock = asyncio.get_running_loop().time
        profile = await measure(executor, limits, clock, 10.0)
        return profile.model, clock()

    model, seconds = run_virtual(run())
    sizes = [*product((1, 4, 32, 200), (1,), (100, 1000)), *product((1,), (30, 700), (0, 3000))]
    steps = [Probe(*size).step(0, limits) for size in sizes]
    errors = [abs(model.step(step) / GPU.step(step) - 1.0) for step in steps]
    return {"error mean": sum(errors) / len(errors), "error most": max(errors), "seconds": seconds}


def _setup(name: str, cost: CostModel = CPU, slots: int = 400_000, **changes: Any) -> Setup:
    settings = replace(BASE, **changes)
    return Setup(name, settings, lambda cost: build("fcfs", cost), cost, slots)


def _scaled(factor: float) -> CostModel:
    """The CPU's model with a curve that is off by this factor."""
    return replace(CPU, curve=tuple((size, factor * seconds) for size, seconds in CPU.curve))


def _drafted(name: str) -> Setup:
    """A CPU whose worker waits for the event loop; iterations are planned ahead."""
    return replace(_setup(name, replace(CPU, idle_step=3e-4, idle_entry=2e-5)), lookahead=1)


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
        "a model twice too fast, a noisy machine", _setup("learning"), believed=_scaled(0.5)
    ),
    "learning, goal": Scenario(
        "a model half too slow, a noisy machine, an ITL goal of 150 ms",
        _setup("learning, goal", itl_goal=0.15),
        believed=_scaled(1.5),
    ),
    "unmeasured": Scenario(
        "no measured model, a noisy GPU",
        _setup("unmeasured", GPU, **GPU_SETTINGS),
        believed=UNMEASURED,
    ),
    "sessions, host": Scenario(
        "120 of them with a third of the blocks, and copies of cached ones on the host",
        replace(
            _setup("sessions, host", GPU, 60_000),
            num_host_slots=400_000,
            saves_on_host=True,
            slot_seconds=5e-6,
        ),
    ),
    "sessions, states": Scenario(
        "these sessions with recurrent layers",
        replace(_setup("sessions, states", GPU, 200_000), num_states=200),
    ),
    "edit": Scenario(
        "predicted outputs, a third wrong", _drafted("edit"), speculation={"method": "prediction"}
    ),
    "again": Scenario(
        "answers of recurring phrases", _drafted("again"), speculation={"method": "suffix"}
    ),
    "draft model": Scenario(
        "a draft model that guesses some answers",
        _drafted("draft model"),
        speculation={"method": "draft_model", "model": "a small one"},
    ),
}
