"""LoRA, recurrent layers, speculation, swapping and a killed worker, on each device.

Two steps are in flight, as under a server. Every token is held to transformers (`pairs`); in
float32 a text is also the one that the worker writes undisturbed.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file

from engine.control.admission import SwapMode
from engine.cost.live import LiveCost
from engine.cost.model import UNMEASURED
from engine.loop import Engine
from engine.lora import LoraAdapter, LoraSpec
from engine.policy import build
from engine.request import RequestSpec
from engine.speculation.drafter import Drafter
from engine.speculation.settings import SpeculationSettings
from engine.transport.multiprocess import MultiprocessExecutor, MultiprocessSettings
from engine.worker.process.worker import Worker
from tests.engine.worker.cuda.launching import LaunchingExecutor
from tests.engine.worker.process.driving import GREEDY
from tests.gpu.pairs import (
    FLOAT32,
    PRECISIONS,
    Oracle,
    gentle_model,
    oracle_of,
    pair_of,
    settings_on,
    tokens_of,
)
from tests.inline import Client, RequestOutcome, engine_over, read_all, serve
from tests.models.builtin_loras import random_lora
from tests.models.drafts import FREE_DRAFTS

ON_EACH_DEVICE = pytest.mark.parametrize("device", PRECISIONS)
BOUNDS: dict[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 40}
LORA_SIZES = {"self_attn.q_proj": (256, 256), "mlp.down_proj": (256, 384)}
NUM_LAYERS = 3
Record = Callable[[str, object], None]


def asks_of(count: int, length: int, **more: Any) -> list[RequestSpec]:
    """Requests with prompts of 9 tokens and more, most of them in several pieces."""
    prompts = [tuple(tokens_of(9 + 13 * number % 90, number)) for number in range(count)]
    return [RequestSpec(prompt, length, GREEDY, **more) for prompt in prompts]


async def outcomes_of(
    worker: Worker, asks: Sequence[RequestSpec], client: Client = read_all, **how: Any
) -> list[RequestOutcome]:
    """What an engine with two steps in flight answers to requests that come at once."""
    executor = LaunchingExecutor(worker, 2, Random(1))
    engine = engine_over(worker.report, executor, lookahead=1, **BOUNDS, **how)
    return await serve(engine, asks, client)


def judge(oracle: Oracle, outcomes: Sequence[RequestOutcome], record: Record, of: str = "") -> None:
    """Record how far the worst token is from the likeliest, and require that it is right."""
    worst = max(oracle.shortfall(one.request.spec.prompt, one.tokens) for one in outcomes)
    record(f"shortfall{of}", round(worst, 4))
    assert worst <= 1


def compare(
    device: str, found: Sequence[RequestOutcome], calm: Sequence[RequestOutcome], record: Record
) -> None:
    """Record how many texts are those of an undisturbed run, and require all in float32."""
    same = sum(
        one.tokens == other.tokens[: len(one.tokens)]
        for one, other in zip(found, calm, strict=True)
    )
    record("same texts", f"{same} of {len(found)}")
    assert same == len(found) or device not in ("cpu", FLOAT32)


@pytest.fixture(scope="module")
def llama() -> Any:
    return gentle_model("llama")


def merged(model: Any, lora: Path) -> Any:
    """The model with an adapter of `random_lora`, whose factor is 2, added to its weights."""
    model, factors = deepcopy(model), load_file(lora / "adapter_model.safetensors")
    for name, down in factors.items():
        if ".lora_A." in name:
            linear = model.get_submodule(
                name.removeprefix("base_model.model.").partition(".lora_")[0]
            )
            linear.weight.data += 2 * factors[name.replace("lora_A", "lora_B")] @ down
    return model


@ON_EACH_DEVICE
@pytest.mark.parametrize("num_at_start", [0, 1])
async def test_loras_and_the_base_model_share_steps(
    llama: Any, device: str, num_at_start: int, tmp_path: Path, record_property: Record
) -> None:
    """With one from the start on, decodes with any are replayed on a GPU, in 16 bits."""
    folders = [
        random_lora(tmp_path / str(number), number, LORA_SIZES, NUM_LAYERS) for number in (1, 2)
    ]
    specs = [LoraSpec(number, str(number), str(each)) for number, each in enumerate(folders, 1)]
    given = tuple(specs[:num_at_start])
    pair = pair_of(llama, tmp_path / "model", device, lookahead=1, loras=given)
    reports = [*pair.worker.report.loras, *map(pair.worker.load_lora, specs[num_at_start:])]
    asks, oracles = asks_of(2, 24), [Oracle(llama, pair.tolerance)]
    for folder, report in zip(folders, reports, strict=True):
        assert not report.error
        lora = LoraAdapter(report.lora_id, str(report.lora_id), report.digest)
        asks += asks_of(2, 24, lora=lora)
        oracles.append(Oracle(merged(llama, folder), pair.tolerance))
    outcomes = await outcomes_of(pair.worker, asks)
    for number, oracle in enumerate(oracles):
        own = outcomes[2 * number : 2 * number + 2]
        judge(oracle, own, record_property, f" of adapter {number}" if number else "")
    for first in (0, 1):  # prompts are the same
        assert len({tuple(one.tokens) for one in outcomes[first::2]}) == 3


@ON_EACH_DEVICE
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite_hybrid"])
async def test_hybrid_models_go_on_after_a_preemption(
    family: str, device: str, tmp_path: Path, record_property: Record
) -> None:
    """With the recurrent layers of Qwen3.5, LFM2 and Mamba 2."""
    pair = pair_of(gentle_model(family), tmp_path, device, lookahead=1)
    outcomes = await outcomes_of(pair.worker, asks_of(8, 30), num_blocks=14)
    num_preemptions = sum(one.request.setbacks.num_preemptions for one in outcomes)
    record_property("preemptions", num_preemptions)
    assert num_preemptions > 0
    judge(pair, outcomes, record_property)


@ON_EACH_DEVICE
async def test_speculation_with_ngrams_changes_no_text(
    llama: Any, device: str, tmp_path: Path, record_property: Record
) -> None:
    pair = pair_of(llama, tmp_path, device, lookahead=1)
    asks = asks_of(6, 60)
    calm = await outcomes_of(pair.worker, asks)
    drafter = Drafter.build(SpeculationSettings("ngram", 4), LiveCost(FREE_DRAFTS))
    found = await outcomes_of(pair.worker, asks, drafter=drafter)
    counts = drafter.counts
    record_property("accepted drafts", f"{counts.num_accepted} of {counts.num_drafts}")
    assert 0 < counts.num_accepted < counts.num_drafts
    judge(pair, found, record_property)
    compare(device, found, calm, record_property)


@ON_EACH_DEVICE
@pytest.mark.parametrize(
    ("policy", "swap"), [("fcfs", SwapMode.REACTIVE), ("mlfq", SwapMode.PROACTIVE)]
)
async def test_swapping_under_load_changes_no_text(
    llama: Any, device: str, policy: str, swap: SwapMode, tmp_path: Path, record_property: Record
) -> None:
    """A third of the clients leave, in whatever state their requests are."""
    pair = pair_of(llama, tmp_path, device, lookahead=1, host_kv_memory=8 << 20)
    asks = asks_of(12, 40)

    async def client(engine: Engine, ask: RequestSpec) -> RequestOutcome:
        return await read_all(engine, ask, 7 if asks.index(ask) % 3 == 2 else None)

    calm = await outcomes_of(pair.worker, asks)
    how: dict[str, Any] = {"policy": build(policy, LiveCost(UNMEASURED)), "swap": swap}
    how |= {"num_blocks": 14, "reuses_prefixes": False}
    found = await outcomes_of(pair.worker, asks, client, **how)
    num_swaps = sum(one.request.setbacks.num_swaps for one in found)
    record_property("swaps", num_swaps)
    assert num_swaps > 0
    assert all(len(one.tokens) == 40 for number, one in enumerate(found) if number % 3 < 2)
    judge(pair, found, record_property)
    compare(device, found, calm, record_property)


@pytest.mark.process
@ON_EACH_DEVICE
async def test_streams_go_on_after_their_worker_was_killed(
    llama: Any, device: str, tmp_path: Path, record_property: Record
) -> None:
    oracle, asks = oracle_of(llama, tmp_path, device), asks_of(6, 40)
    executor = MultiprocessExecutor(
        settings_on(device, tmp_path, lookahead=1, **BOUNDS),
        MultiprocessSettings(depth=2, restart_pause=0.0),
    )
    report = await executor.start(lambda *_: None)
    bounds: dict[str, Any] = {"lookahead": 1, **BOUNDS}
    killed_at = 0.0

    async def client(engine: Engine, ask: RequestSpec) -> RequestOutcome:
        if ask is not asks[0]:
            return await read_all(engine, ask)
        with engine.stream(ask) as stream:
            outcome = RequestOutcome(stream.request)
            while outcome.finish is None:
                chunk = await stream.next()
                outcome.tokens += chunk.tokens
                outcome.finish = chunk.finish
                nonlocal killed_at
                if len(outcome.tokens) >= 10 and not killed_at:
                    killed_at = time.monotonic()
                    os.kill(executor.pids[0], signal.SIGKILL)
        return outcome

    try:
        calm = await serve(engine_over(report, executor, **bounds), asks, read_all)
        found = await serve(engine_over(report, executor, **bounds), asks, client)
        seconds = time.monotonic() - killed_at
    finally:
        await executor.close()
    record_property("seconds from the kill to the end", round(seconds, 1))
    assert executor.num_restarts == 1
    judge(oracle, found, record_property)
    compare(device, found, calm, record_property)
