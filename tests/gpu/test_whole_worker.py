"""A worker on each device beside transformers in float32: logits, outputs, cancelling, swapping.

Weights are rounded to bfloat16 beforehand, so that both hold the same numbers. On a GPU the
allowed error is relative (L2): 2e-2, or twice that of transformers' own bfloat16 where that is
more. A sampled token is right if float32 finds it the likeliest, up to that error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.control.admission import SwapMode
from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import build
from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import GREEDY, Driver, settings_for
from tests.inline import RequestOutcome, engine_over, read_all, serve
from tests.inline_executor import InlineExecutor
from tests.models.checkpoints import VARIANTS, make_model
from tests.scheduling import planned
from tests.worker_settings import changed

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # kernels of GPUs know few
    "max_position_embeddings": 512,
}
WIDE_GPT2 = {"n_embd": 256, "n_head": 4, "n_positions": 512}
FAMILIES = ("llama", "llama3_rope", "mistral", "mistral_window", "qwen2_tied", "qwen3", "gpt2")
BLOCK = 16
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2}
HAS_GPU = torch.cuda.is_available()
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")],
    ),
]


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers, in float32, and in a worker; the error that is allowed."""

    model: Any
    worker: Worker
    tolerance: float

    def expected(self, tokens: Sequence[int]) -> Tensor:
        """Logits at every position, `[tokens, vocab]`."""
        return logits_of(self.model, tokens)

    def shortfall(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """By how much the worst token of a greedy text is less likely than the likeliest, over
        what is allowed; at most 1 for a right one."""
        logits = self.expected([*prompt, *output[:-1]])[len(prompt) - 1 :]
        chosen = logits[range(len(output)), list(output)]
        allowed = 4 * self.tolerance * logits.square().mean().sqrt()  # of two errors, at the tail
        return float(((logits.max(dim=-1).values - chosen) / allowed).max())


def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.float()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def gentle_model(family: str) -> Any:
    """Rounded, and with attention that is no choice of one token."""
    wide = WIDE_GPT2 if VARIANTS[family][0] == "GPT2Config" else WIDE
    model = make_model(family, **wide)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.dim() > 1 else 1.0)
            parameter.copy_(parameter.bfloat16().float())
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return gentle_model(str(request.param))


def pair_of(model: Any, directory: Path, device: str, **more: Any) -> Pair:
    model.save_pretrained(directory)
    # XQA would be compiled for each of these small shapes
    attention = "flashinfer-fa2" if device == "cuda" else "auto"
    settings = settings_for(directory, attention, block_size=BLOCK, kv_slots=64 * BLOCK)
    if device == "cuda":
        settings = changed(settings, kv_cache_dtype="auto")
    worker = Worker.load(changed(settings, device=device, **more), lambda *_: None)
    tolerance = TOLERANCE[device]
    if device == "cuda":
        load, text = transformers.AutoModelForCausalLM.from_pretrained, tokens_of(100, 7)
        own = logits_of(load(directory, dtype=torch.bfloat16), text)
        tolerance = max(tolerance, 2 * error(own, logits_of(model, text)))
    return Pair(model, worker, tolerance)


def tokens_of(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(97), k=length)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("swap", [SwapMode.REACTIVE, SwapMode.PROACTIVE])
def test_who_was_swapped_out_and_in_goes_on_with_its_own_text(
    llama: Any, device: str, swap: SwapMode, tmp_path: Path
) -> None:
    pair = pair_of(llama, tmp_path, device, host_kv_memory=8 << 20)
    report = pair.worker.report
    bounds = SchedulerSettings(
        max_model_len=512, max_batch_size=3, max_batch_tokens=64, swap=swap, reuses_prefixes=False
    )
    ledger = KVLedger(KVShape(14, report.block_size, report.tiers.num_host_blocks))
    scheduler = IterationScheduler(bounds, ledger, build("mlfq", LiveCost(UNMEASURED)))
    asks = [
        RequestSpec(tuple(tokens_of(20 + 9 * number, number)), 40, SamplingParams(temperature=0.0))
        for number in range(6)
    ]
    requests = [scheduler.add(ask, 0.0) for ask in asks]
    now = 0.0
    while scheduler.pool:
        iteration = planned(scheduler, now)
        now += 0.01
        scheduler.commit(iteration, pair.worker.run(iteration.step), now)
        ledger.check()
    assert sum(request.setbacks.num_swaps for request in requests) > 0
    assert all(pair.shortfall(one.spec.prompt, one.output) <= 1 for one in requests)
