"""Steps launched ahead on stand-ins for a GPU produce the same tokens as the CPU's worker.

Prompts in pieces beside decodes, clients that leave, preemption with and without a host tier,
penalties, grammars' bans, log-probabilities and requests that fail, all with two steps in flight.
"""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import EngineError
from engine.iteration import Observer
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.priority import LowestPriorityFirst
from engine.request import Request, RequestSpec
from engine.step import BlockMove, SamplingParams
from engine.worker.process.worker import Worker
from tests.engine.worker.cuda.launching import LaunchesSteps, LaunchingExecutor, on_stand_ins
from tests.engine.worker.process.driving import load_worker
from tests.inline import play
from tests.models.checkpoints import make_checkpoint

VOCAB = 97
COUNT = 14
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=3)
WAYS = (
    GREEDY,
    SEEDED,
    replace(SEEDED, presence_penalty=1.5),
    replace(GREEDY, frequency_penalty=0.7, logit_bias=((5, 2.0), (6, -3.0))),
    replace(GREEDY, repetition_penalty=1.3),
    replace(SEEDED, repetition_penalty=0.8, min_p=0.02, top_k=20),
    replace(GREEDY, logit_bias=((VOCAB + 5, 1.0),)),  # is refused by the worker
)


def an_ask(number: int) -> RequestSpec:
    random = Random(number)
    return RequestSpec(
        tuple(random.choices(range(VOCAB), k=2 + 5 * number % 23)),
        max_tokens=10 + 3 * number % 13,
        sampling=WAYS[number % len(WAYS)],
        end_ids=frozenset(range(0, VOCAB, 20)),
        min_tokens=4 * (number % 3),
        logprobs=number % 4 if number % 2 else None,
        prompt_logprobs=1 if number % 5 == 0 else None,
        priority=COUNT - number,
    )


@dataclass
class StreamOutcome:
    """The tokens and the end of one stream."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    error: str


@dataclass
class EventCounts(Observer):
    """Counts preemptions and swaps."""

    num_swaps: int = 0
    num_recomputed: int = 0

    def preempted(self, request: Request, now: float) -> None:
        self.num_recomputed += 1

    def swapped(self, request: Request, move: BlockMove, now: float) -> None:
        self.num_swaps += 1


async def read(engine: Engine, ask: RequestSpec, until: int) -> StreamOutcome:
    outcome = StreamOutcome([], [], [], "")
    with engine.stream(ask) as stream:
        while len(outcome.tokens) < until:
            try:
                chunk = await stream.next()
            except EngineError as error:
                outcome.error = type(error).__name__
                break
            outcome.tokens += chunk.tokens
            outcome.logprobs += [one.logprob for one in chunk.logprobs]
            outcome.prompt_logprobs += [one.logprob for one in chunk.prompt_logprobs]
            if chunk.finish is not None:
                break
    return outcome


async def serve(
    on_gpu: LaunchesSteps, lookahead: int, num_blocks: int, seed: int
) -> tuple[list[StreamOutcome], EventCounts]:
    """Serve all requests, more urgent ones later; every fourth is cancelled in the middle."""
    report, counts = on_gpu.worker.report, EventCounts()
    ledger = KVLedger(KVShape(num_blocks, report.block_size, report.tiers.num_host_blocks))
    bounds = SchedulerSettings(max_model_len=60, max_batch_size=6, max_batch_tokens=13)
    scheduler = IterationScheduler(bounds, ledger, LowestPriorityFirst(), counts)
    executor = LaunchingExecutor(on_gpu, 1 + lookahead, Random(seed))
    engine = Engine(scheduler, executor, asyncio.get_running_loop().time, lookahead=lookahead)
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        outcomes = await asyncio.gather(
            *(read(engine, an_ask(number), 3 if number % 4 == 3 else 99) for number in range(COUNT))
        )
        await engine.drain(30)
        running.cancel()
    ledger.check()
    assert ledger.num_held == 0
    return outcomes, counts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[StreamOutcome]:
    """The outputs of the CPU's worker, without lookahead and with KV blocks for all."""
    worker: Worker = load_worker(model)
    return [
        StreamOutcome(
            outcome.tokens,
            [one.logprob for one in outcome.logprobs],
            [one.logprob for one in outcome.prompt_logprobs],
            "" if outcome.error is None else type(outcome.error).__name__,
        )
        for outcome in play(worker, [an_ask(number) for number in range(COUNT)])
    ]


@pytest.mark.parametrize(
    ("lookahead", "num_blocks", "host_kv_memory", "cuda_graphs"),
    [
        (0, 128, 0, True),
        (1, 128, 0, False),
        (1, 20, 0, True),
        (1, 20, 1 << 16, True),
    ],
)
async def test_what_is_launched_ahead_says_what_the_cpu_says(
    model: Path,
    expected: list[StreamOutcome],
    lookahead: int,
    num_blocks: int,
    host_kv_memory: int,
    cuda_graphs: bool,
) -> None:
    on_gpu = on_stand_ins(
        model,
        lookahead=lookahead,
        host_kv_memory=host_kv_memory,
        cuda_graphs=cuda_graphs,
        max_batch_size=6,
        max_batch_tokens=13,
    )
    outcomes, counts = await serve(on_gpu, lookahead, num_blocks, seed=num_blocks)
    for number, (one, whole) in enumerate(zip(outcomes, expected, strict=True)):
        assert one.error == whole.error
        assert one.tokens == whole.tokens[: len(one.tokens)]
        assert len(one.tokens) == len(whole.tokens) or number % 4 == 3
        assert one.logprobs == pytest.approx(whole.logprobs[: len(one.logprobs)], abs=1e-4)
        assert len(one.logprobs) == (len(one.tokens) if number % 2 else 0)
        assert one.prompt_logprobs == pytest.approx(whole.prompt_logprobs, abs=1e-4)
    assert {one.error for one in outcomes} == {"", "NoAllowedToken"}
    if num_blocks < 128:
        assert counts.num_swaps if host_kv_memory else counts.num_recomputed
    replays = sum(graph.num_replays for graph in on_gpu.device.streams.graphs)
    assert (replays > 5) == cuda_graphs
