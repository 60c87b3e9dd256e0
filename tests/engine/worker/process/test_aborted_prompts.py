"""A prompt is given up after any iteration and sent again: the same bits as one that is computed
whole, from where the attempt before stopped."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from engine.iteration import Iteration, Observer
from engine.kv import request_states
from engine.loop import Engine
from engine.request import RequestSpec
from engine.step import SamplingParams, TokenLogprobs
from tests.engine.worker.process.fleet import FleetExecutor, fleet
from tests.inline import engine_over, read_all
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
    outcome = await read_all(engine, spec)
    return [*zip(outcome.tokens, outcome.logprobs, strict=True)], outcome.request.num_cached


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
        executor = FleetExecutor(workers, lookahead)
        engine = engine_over(
            workers.report, executor, lookahead=lookahead, observer=iterations,
            max_batch_size=1, max_batch_tokens=CHUNK,
        )  # fmt: skip
        running = asyncio.create_task(engine.run())
        for count in range(1, len(PROMPT) // CHUNK + 1):
            longer = PROMPT + (5,) * (count % 3)
            whole, num_cached = await answer_of(engine, spec_of(longer, f"whole {count}"))
            assert num_cached == 0
            iterations.left, salt = count, f"retried {count}"
            iterations.reached.clear()
            with engine.stream(spec_of(PROMPT, salt)):
                await iterations.reached.wait()
            while engine.scheduler.pool:  # noqa: ASYNC110 # the last iteration returns
                await asyncio.sleep(0)
            retried, num_cached = await answer_of(engine, spec_of(longer, salt))
            assert retried == whole
            assert num_cached >= count * CHUNK - SNAPSHOTS - workers.report.block_size
        running.cancel()
        executor.close()
