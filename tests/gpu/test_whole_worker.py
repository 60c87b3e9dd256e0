"""A worker on each device beside transformers in float32 (`pairs`): logits of families and of
steps of all sizes, KV in 8 bits and on the host, outputs, cancelling."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.loop import Engine
from engine.request import RequestSpec
from engine.step import BlockMove, Direction, SamplingParams, Step, StepId
from tests.engine.worker.process.driving import GREEDY, Driver
from tests.gpu.pairs import DEVICES, error, gentle_model, pair_of, tokens_of
from tests.inline import RequestOutcome, engine_over, read_all, serve
from tests.inline_executor import InlineExecutor

FAMILIES = (
    *("llama", "llama3_rope", "mistral", "mistral_window", "qwen2_tied", "qwen3", "gpt2"),
    *("gemma2", "gemma3", "gemma4", "phi3", "stablelm", "opt", "cohere2", "glm4", "nemotron"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "gemma4_moe"),
    *("deepseek_v2", "deepseek_v3_groups", "glm4_moe_lite"),
)
PIECES = ((64, 0, 15), (1, 30, 1), (70, 1, 1), (1, 1, 0), (1, 1, 0))
# Steps with as many tokens as a GPU's graphs have, and more, beside decodes and without
SIZES = ((64, 0, 0), (65, 0, 0), (300, 212, 0), (0, 113, 400), (1, 1, 62), (1, 1, 1))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return gentle_model(str(request.param))


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_those_of_transformers_in_prefill_pieces_and_decodes(
    model: Any, device: str, tmp_path: Path
) -> None:
    pair = pair_of(model, tmp_path, device)
    pair.check(pair.errors(PIECES))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_latent_vectors_are_cached_and_read_in_steps_of_all_sizes(
    family: str, device: str, tmp_path: Path
) -> None:
    pair = pair_of(gentle_model(family), tmp_path, device, kv_slots=1400)
    report = pair.worker.report
    size = 4 if report.kv_dtype == "float32" else 2
    assert report.bytes_per_block == 3 * report.block_size * size * (512 + 64)
    pair.check(pair.errors(SIZES))


@pytest.fixture(scope="module")
def llama() -> Any:
    return gentle_model("llama")


@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_all_sizes(llama: Any, device: str, tmp_path: Path) -> None:
    pair = pair_of(llama, tmp_path, device, kv_slots=1400)
    pair.check(pair.errors(SIZES))


@pytest.mark.parametrize("device", DEVICES)
def test_float16(device: str, tmp_path: Path) -> None:
    """KV on a CPU, and on a GPU all else, too."""
    model = gentle_model("llama", head_dim=128)
    half = {"kv_cache_dtype": "float16"} if device == "cpu" else {"dtype": "float16"}
    pair = pair_of(model, tmp_path, device, **half)
    assert pair.worker.report.kv_dtype == "float16"
    assert max(pair.errors(PIECES)) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_kv_in_8_bits(device: str, tmp_path: Path) -> None:
    """Integers on a CPU, floats on a GPU."""
    model = gentle_model("llama", head_dim=128)
    kv = "int8" if device == "cpu" else "fp8"
    pair = pair_of(model, tmp_path, device, kv_cache_dtype=kv)
    assert pair.worker.report.kv_dtype != pair.worker.report.dtype
    assert max(pair.errors(PIECES)) < 0.1


@pytest.mark.parametrize("device", DEVICES)
def test_kv_comes_back_from_the_end_of_a_large_host_tier(
    llama: Any, device: str, tmp_path: Path
) -> None:
    pair = pair_of(llama, tmp_path, device, host_kv_memory=256 << 20)
    driver, text = Driver(pair.worker), tokens_of(61, 3)
    last = pair.worker.report.tiers.num_host_blocks
    driver.logits((0, text[:60]))
    (found,) = driver.logits((0, text[60:]))
    table, host = driver.blocks[0, 0], range(last - 4, last)
    moved = [driver.free.pop() for _ in table]
    moves = [
        BlockMove(direction, ints(blocks), ints(host), is_awaited=True)
        for direction, blocks in ((Direction.OUT, table), (Direction.IN, moved))
    ]
    for number, move in enumerate(moves):
        assert not pair.worker.run(Step(StepId(number), (), (move,))).unread
    driver.blocks[0, 0], driver.lengths[0] = moved, 60
    (again,) = driver.logits((0, text[60:]))
    assert torch.equal(again, found)
    assert error(found.float().cpu(), pair.expected(text)[-1]) < pair.tolerance


def ints(numbers: Iterable[int]) -> bytes:
    return np.array([*numbers], "<i4").tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_batch_invariant_logits_have_the_same_bits_in_any_company(
    llama: Any, device: str, tmp_path: Path
) -> None:
    pair = pair_of(llama, tmp_path, device, batch_invariant=device != "cpu")
    text, others = tokens_of(40, 1), [tokens_of(length, length) for length in (3, 70, 300, 280)]
    alone, together = Driver(pair.worker), Driver(pair.worker)
    expected = [alone.logits((0, piece))[0] for piece in (text[:38], text[38:39], text[39:])]
    assert error(expected[-1].float().cpu(), pair.expected(text)[-1]) < pair.tolerance
    found = [
        together.logits((1, others[0]), (0, text[:38]))[1],
        together.logits((0, text[38:39]), (2, others[1]))[0],
        together.logits((0, text[39:]), (1, others[0][:1]), (3, others[2]), (4, others[3]))[0],
    ]
    assert all(map(torch.equal, found, expected))


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
