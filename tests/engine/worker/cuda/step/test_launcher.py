"""Steps launched by hand: a failed one reports its own error, and the next one runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.errors import WorkerLost
from engine.step import (
    LAST_TOKEN,
    BlockMove,
    Direction,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
)
from engine.worker.cuda.step.arena import NUM_BUFFERS, StepArena
from engine.worker.cuda.step.graphs import graph_sizes
from engine.worker.sampling.logits_output import OutputReader
from tests.engine.worker.cuda.launching import OnStandIns, on_stand_ins
from tests.engine.worker.cuda.standin import StandInStreams
from tests.engine.worker.process.driving import load_worker
from tests.models.checkpoints import make_checkpoint

GREEDY = SampleSpec(SamplingParams(temperature=0.0))
PENALISED = SampleSpec(SamplingParams(temperature=0.0, presence_penalty=1.5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def on_gpu(model: Path) -> OnStandIns:
    return on_stand_ins(model, max_batch_size=4, max_batch_tokens=16, host_kv_memory=1 << 16)


def entry(request: int, start: int, *tokens: int, spec: SampleSpec | None = GREEDY) -> StepEntry:
    """Request n has blocks 4n, 4n + 1, …"""
    blocks = np.arange(4 * request, 4 * request + 4, dtype="<i4").tobytes()
    return StepEntry(RequestId(request), start, tokens, blocks, spec)


def step(number: int, *entries: StepEntry, moves: tuple[BlockMove, ...] = ()) -> Step:
    return Step(StepId(number), entries, moves)


def test_a_step_goes_on_from_a_token_that_nobody_has_read(on_gpu: OnStandIns, model: Path) -> None:
    plain = load_worker(model)
    (first,) = plain.run(step(0, entry(0, 0, 7, 8, 9))).tokens
    told = SampleSpec(replace(PENALISED.sampling), output=(first,))
    (second,) = plain.run(step(1, entry(0, 3, first, spec=told))).tokens
    launched = [
        on_gpu.launch(step(0, entry(0, 0, 7, 8, 9, spec=PENALISED))),
        on_gpu.launch(step(1, entry(0, 3, LAST_TOKEN, spec=PENALISED._replace(continues=True)))),
    ]
    assert all(one.may_wait for one in launched)
    results = [one.collect() for one in launched]
    assert [found.result.tokens for found in results] == [(first,), (second,)]
    assert all(found.result.seconds > 0 for found in results)
    assert results[1].times.idle >= 0
    assert results[1].times.ended_at >= results[1].times.began_at


def test_a_step_that_fails_while_it_is_launched_leaves_those_around_it_alone(
    on_gpu: OnStandIns,
) -> None:
    alone = on_gpu.worker.run(step(0, entry(1, 0, 5, 6))).tokens
    before = on_gpu.launch(step(1, entry(1, 0, 5, 6)))
    with pytest.raises(ValueError, match="token ids out of range"):
        on_gpu.worker.launch(step(2, entry(2, 0, 1000)))
    ahead = entry(2, 1, LAST_TOKEN)  # of the step that failed: whatever it yields is dropped
    after = on_gpu.launch(step(3, ahead, entry(1, 0, 5, 6)))
    assert before.collect().result.tokens == alone
    assert after.collect().result.tokens[1:] == alone


def test_a_row_that_was_computed_badly_is_its_own_fault_and_read_late(
    on_gpu: OnStandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = on_gpu.worker.parts
    reader = parts.reader
    assert isinstance(reader, OutputReader)
    head = reader.head

    def spoilt(hidden: Tensor) -> Tensor:
        logits: Tensor | None = head(hidden)
        assert logits is not None
        logits[0] = torch.nan
        return logits

    alone = on_gpu.worker.run(step(0, entry(1, 0, 5, 6))).tokens
    spoilt_parts = replace(parts, reader=replace(reader, head=spoilt))
    monkeypatch.setattr(on_gpu.worker.pipeline, "_parts", spoilt_parts)
    bad = on_gpu.launch(step(1, entry(0, 0, 3, 4), entry(1, 0, 5, 6)))
    monkeypatch.undo()
    ahead = on_gpu.launch(step(2, entry(0, 2, LAST_TOKEN), entry(1, 0, 5, 6)))
    result = bad.collect().result
    assert [(fault.entry, fault.is_caller_error) for fault in result.faults] == [(0, False)]
    assert result.tokens[1:] == alone
    assert ahead.collect().result.tokens[1:] == alone


def test_a_device_that_is_gone_is_told_instead_of_the_step(
    on_gpu: OnStandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise WorkerLost("the GPU failed")

    monkeypatch.setattr(on_gpu.device.streams, "synchronize", gone)
    with pytest.raises(WorkerLost, match="the GPU failed"):
        on_gpu.worker.launch(step(1, entry(2, 0, 1000)))


def test_moves_are_done_when_the_result_is_there_and_awaited_ones_before_the_layers(
    on_gpu: OnStandIns,
) -> None:
    """Request 3 computes; its first block goes out, another comes in where it was read from."""
    tokens = on_gpu.worker.run(step(0, entry(3, 0, *range(1, 9)))).tokens

    def move(direction: Direction, device: int, host: int, *, is_awaited: bool) -> BlockMove:
        there, here = (np.array([block], dtype="<i4").tobytes() for block in (device, host))
        return BlockMove(direction, there, here, is_awaited)

    out = move(Direction.OUT, 12, 1, is_awaited=False)
    on_gpu.launch(step(1, entry(0, 0, 1), moves=(out,))).collect()
    on_gpu.worker.run(step(2, entry(3, 0, 60, 61, 62, 63, spec=None)))  # overwrites the block
    back = move(Direction.IN, 12, 1, is_awaited=True)
    again = on_gpu.launch(step(3, entry(3, 7, 8), moves=(back,)))
    assert again.collect().result.tokens == tokens
    wrong = move(Direction.IN, 12, 10_000, is_awaited=True)
    with pytest.raises(ValueError, match="host block ids out of range"):
        on_gpu.worker.launch(step(4, entry(3, 7, 8), moves=(wrong,)))


def test_graphs_are_captured_largest_first_and_told_of(on_gpu: OnStandIns) -> None:
    told = [news for news in on_gpu.progress if news[0] == "graphs"]
    assert told == [("graphs", done, 4) for done in range(5)]
    attention = on_gpu.device.made[-1]
    assert attention.planned[:12] == [size for size in (-16, 4, 2, 1) for _ in range(3)]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64))],
)
def test_sizes_end_with_the_largest_batch(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


def test_an_arena_waits_for_the_copy_from_its_memory_before_it_is_written_again() -> None:
    streams = StandInStreams()
    arena = StepArena(streams, 8)
    for turn in range(2 * NUM_BUFFERS):
        (found,) = arena.put(np.full(3, turn, dtype=np.int64))
        assert found.tolist() == [turn] * 3
    assert streams.num_host_waits == NUM_BUFFERS
    streams.synchronize()


def test_the_stand_in_refuses_memory_that_is_written_while_it_is_read() -> None:
    streams = StandInStreams()
    pinned = streams.pinned((3,), torch.int64)
    streams.copy(torch.zeros(3, dtype=torch.int64), pinned)
    pinned.fill_(1)
    with pytest.raises(AssertionError, match="pinned memory was written"):
        streams.synchronize()
