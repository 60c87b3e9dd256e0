"""A prompt is given up after any iteration and sent again: the same bits as one that is computed
whole, from where the attempt before stopped."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.iteration import Iteration, Observer
from engine.kv import request_states
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import RequestSpec
from engine.step import SamplingParams, TokenLogprobs
from tests.engine.worker.process.fleet import FleetExecutor, fleet
from tests.models.checkpoints import make_checkpoint

PROMPT = tuple(Random(1).choices(range(97), k=70))
CHUNK, SNAPSHOTS = 10, 8
Answer = list[tuple[int, TokenLogprobs]]


class Iterations(Observer):
    """Sets `reached` when so many iterations were submitted."""

    def __init__(self) -> None:
        self.left = 0
        self.reached = asyncio.Event()

    def planned(self, iteration: Iteration, now: float) -> None:
        self.left -= 1
        if self.left == 0:
            self.reached.set()


def spec_of(prompt: tuple[int, ...], salt: str) -> RequestSpec:
    return RequestSpec(prompt, 8, SamplingParams(temperature=1.0, seed=3), logprobs=1, salt=salt)


async def answer_of(engine: Engine, spec: RequestSpec) -> tuple[Answer, int]:
    """The tokens with their log-probabilities, and how many prompt tokens were cached."""
    answer: Answer = []
    with engine.stream(spec) as stream:
        while True:
            chunk = await stream.next()
            answer += zip(chunk.tokens, chunk.logprobs, strict=True)
            if chunk.finish is not None:
                return answer, stream.request.num_cached


@pytest.mark.parametrize(
    ("variant", "lookahead"), [("llama", 1), ("gemma3", 0), ("qwen3_5", 0), ("qwen3_5", 1)]
)
async def test_a_retry_has_the_bits_of_a_prompt_that_is_computed_whole(
    tmp_path: Path, variant: str, lookahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_states, "SNAPSHOT_TOKENS", SNAPSHOTS)
    make_checkpoint(tmp_path, variant)
    iterations = Iterations()
    with fleet(
        tmp_path, 1, 1, attention="cpu", kv_slots=4000, num_states=6 if variant == "qwen3_5" else 0,
        lookahead=lookahead,
    ) as workers:  # fmt: skip
        report = workers.report
        bounds = SchedulerSettings(max_model_len=100, max_batch_size=1, max_batch_tokens=CHUNK)
        shape = KVShape(
            report.num_blocks,
            report.block_size,
            windows=report.windows,
            chunk=CHUNK * (1 + lookahead),
            num_states=report.num_states,
        )
        scheduler = IterationScheduler(bounds, KVLedger(shape), FirstComeFirstServed(), iterations)
        executor = FleetExecutor(workers, lookahead)
        engine = Engine(scheduler, executor, asyncio.get_running_loop().time, lookahead=lookahead)
        running = asyncio.create_task(engine.run())
        for count in range(1, len(PROMPT) // CHUNK + 1):
            longer = PROMPT + (5,) * (count % 3)
            whole, num_cached = await answer_of(engine, spec_of(longer, f"whole {count}"))
            assert num_cached == 0
            iterations.left, salt = count, f"retried {count}"
            iterations.reached.clear()
            with engine.stream(spec_of(PROMPT, salt)):
                await iterations.reached.wait()
            while scheduler.pool:  # noqa: ASYNC110 # the last iteration returns
                await asyncio.sleep(0)
            retried, num_cached = await answer_of(engine, spec_of(longer, salt))
            assert retried == whole
            assert num_cached >= count * CHUNK - SNAPSHOTS - report.block_size
        running.cancel()
        executor.close()
