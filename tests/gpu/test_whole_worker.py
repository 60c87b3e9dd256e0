"""A worker on each device beside transformers in float32 (`pairs`): logits, outputs, cancelling."""

from pathlib import Path
from typing import Any

import pytest

from engine.loop import Engine
from engine.request import RequestSpec
from engine.step import SamplingParams
from tests.engine.worker.process.driving import GREEDY, Driver
from tests.gpu.pairs import DEVICES, error, gentle_model, pair_of, tokens_of
from tests.inline import RequestOutcome, engine_over, read_all, serve
from tests.inline_executor import InlineExecutor

FAMILIES = ("llama", "llama3_rope", "mistral", "mistral_window", "qwen2_tied", "qwen3", "gpt2")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return gentle_model(str(request.param))


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_those_of_transformers_in_prefill_pieces_and_decodes(
    model: Any, device: str, tmp_path: Path
) -> None:
    pair = pair_of(model, tmp_path, device)
    texts = [tokens_of(length, seed) for seed, length in enumerate((150, 33, 17))]
    expected = [pair.expected(text) for text in texts]
    driver, done = Driver(pair.worker), [0, 0, 0]
    for pieces in ((64, 0, 15), (1, 30, 1), (70, 1, 1), (1, 1, 0), (1, 1, 0)):
        asked = [(at, count) for at, count in enumerate(pieces) if count]
        asked.sort(key=lambda piece: piece[1] > 1)  # decodes come first
        found = driver.logits(*((at, texts[at][done[at] :][:count]) for at, count in asked))
        for row, (at, count) in zip(found.float().cpu(), asked, strict=True):
            done[at] += count
            assert error(row, expected[at][done[at] - 1]) < pair.tolerance


@pytest.fixture(scope="module")
def llama() -> Any:
    return gentle_model("llama")


@pytest.mark.parametrize("device", DEVICES)
def test_texts_written_together_are_greedy_ones(llama: Any, device: str, tmp_path: Path) -> None:
    pair = pair_of(llama, tmp_path, device)
    driver = Driver(pair.worker)
    prompts = [tokens_of(5 + 11 * number, number) for number in range(6)]
    feeds = [list(prompt) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(30):
        sampled = driver.tokens(*((at, feed, GREEDY) for at, feed in enumerate(feeds)))
        feeds = [[token] for token in sampled]
        for output, token in zip(outputs, sampled, strict=True):
            output.append(token)
    assert max(map(pair.shortfall, prompts, outputs)) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lookahead", [0, 1])
async def test_who_leaves_leaves_nothing_behind(
    llama: Any, device: str, lookahead: int, tmp_path: Path
) -> None:
    pair = pair_of(llama, tmp_path, device, lookahead=lookahead)
    executor = InlineExecutor(pair.worker, 1 + lookahead)
    bounds: dict[str, Any] = {"lookahead": lookahead, "max_batch_size": 4, "max_batch_tokens": 40}
    engine = engine_over(pair.worker.report, executor, **bounds)
    asks = [
        RequestSpec(tuple(tokens_of(9 + 13 * number, number)), 24, SamplingParams(temperature=0.0))
        for number in range(8)
    ]

    async def client(engine: Engine, ask: RequestSpec) -> RequestOutcome:
        return await read_all(engine, ask, 5 if asks.index(ask) % 2 else None)

    answers = await serve(engine, asks, client)
    for at, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        assert len(answer.tokens) == 24 if at % 2 == 0 else len(answer.tokens) < 24
        assert pair.shortfall(ask.prompt, answer.tokens) <= 1
