import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import StartupError, WorkerLost
from engine.step import LAST_TOKEN, PromptTargets, StepEntry
from engine.worker.cuda.step.graphs import MAX_PAIRS, GraphKind, StepGraphs, mixed_sizes
from engine.worker.model.layout import LayoutLimits, build_layout
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.cuda.launching import OnStandIns, on_stand_ins
from tests.engine.worker.cuda.standin import StandInStreams
from tests.engine.worker.cuda.step.test_launcher import entry, step
from tests.models.checkpoints import make_checkpoint

LIMITS: dict[str, Any] = {"max_batch_size": 4, "max_batch_tokens": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def with_graphs(model: Path) -> OnStandIns:
    return on_stand_ins(model, **LIMITS)


@pytest.fixture(scope="module")
def eager(model: Path) -> OnStandIns:
    return on_stand_ins(model, **LIMITS, cuda_graphs=False)


@pytest.fixture
def replayed(with_graphs: OnStandIns) -> Callable[[], list[int]]:
    """The rows of the steps planned for a graph, negative with prompts."""
    planned = with_graphs.device.made[-1].planned
    count = len(planned)
    return lambda: planned[count:]


def both(number: int, *entries: StepEntry, on: tuple[OnStandIns, OnStandIns]) -> list[object]:
    return [worker.run(step(number, *entries)).tokens for worker in on]


def prompt(request: int, start: int, count: int, *, samples: bool = True) -> StepEntry:
    tokens = [(7 * request + 3 * number) % 60 for number in range(start, start + count)]
    made = entry(request, start, *tokens)
    return made if samples else made._replace(sample=None)


@pytest.mark.parametrize(
    ("size", "sizes"),
    [(16, (16,)), (96, (64, 96)), (512, (64, 128, 192, 256, 320, 384, 448, 512))],
)
def test_sizes_end_with_the_largest_step_that_the_host_binds(
    size: int, sizes: tuple[int, ...]
) -> None:
    assert mixed_sizes(size) == sizes
    assert mixed_sizes(8192) == mixed_sizes(512)


def test_the_engine_is_told_of_the_sizes(with_graphs: OnStandIns, eager: OnStandIns) -> None:
    assert with_graphs.report.graphs == (64, 96)
    assert eager.report.graphs == ()


SHAPES = {
    "a decode and a piece": ((1, 0), (0, 9)),
    "decodes and two pieces": ((1, 0), (1, 0), (0, 5), (0, 12)),
    "a piece that samples nothing": ((1, 0), (0, 6)),
    "a piece behind the first one": ((1, 0), (8, 7)),
    "pieces only": ((0, 3), (0, 11)),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_mixed_step_replays_a_graph_and_gives_the_tokens_of_an_eager_one(
    shape: tuple[tuple[int, int], ...],
    with_graphs: OnStandIns,
    eager: OnStandIns,
    replayed: Callable[[], list[int]],
) -> None:
    """A shape is (1, 0) for a decode, else a piece's first position and its length."""
    workers = (with_graphs, eager)
    warm = [prompt(request, 0, 8) for request in range(len(shape))]
    first, second = both(0, *warm, on=workers)
    assert first == second
    entries = [
        entry(request, 8, LAST_TOKEN) if count == 0 else prompt(request, start, count)
        for request, (start, count) in enumerate(shape)
    ]
    found, wanted = both(1, *entries, on=workers)
    assert found == wanted
    assert replayed() == [-64, -64], "the prompts, then the mixed step"


@pytest.mark.parametrize("is_decode", [False, True])
def test_a_graph_whose_plan_has_changed_is_dropped_and_its_step_runs_eagerly(
    is_decode: bool,
    model: Path,
    eager: OnStandIns,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = on_stand_ins(model, **LIMITS)
    warm = [prompt(request, 0, 8) for request in range(2)]
    first, second = both(0, *warm, on=(worker, eager))
    assert first == second
    entries = [entry(0, 8, LAST_TOKEN)]
    if not is_decode:
        entries.append(prompt(1, 8, 5))
    attention = worker.device.made[-1]
    monkeypatch.setattr(attention, "plan_captured", lambda layout: (-1,))
    for number in range(1, 5):  # each drops the next larger graph, if there is one
        found, wanted = both(number, *entries, on=(worker, eager))
        assert found == wanted
    assert caplog.text.count("which is dropped") == (3 if is_decode else 2)


def test_log_probabilities_of_a_prompt_come_from_a_graph_too(
    with_graphs: OnStandIns, eager: OnStandIns, replayed: Callable[[], list[int]]
) -> None:
    scored = prompt(1, 0, 3)._replace(prompt_logprobs=PromptTargets(2, 0, (6, 7)))
    results = [worker.run(step(3, scored)) for worker in (with_graphs, eager)]
    found, wanted = (result.prompt_logprobs[0] for result in results)
    for mine, other in zip(found, wanted, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert replayed() == [-64]


def test_a_step_that_no_graph_holds_runs_eagerly(model: Path, eager: OnStandIns) -> None:
    wide = on_stand_ins(model, max_batch_size=4, max_batch_tokens=40)
    planned = wide.device.made[-1].planned
    count = len(planned)
    pair = step(0, *[prompt(request, 0, 13) for request in range(3)])
    assert wide.run(pair).tokens == eager.run(pair).tokens
    assert planned[count:] == [-40]


def test_pieces_far_behind_the_start_of_a_prompt_run_eagerly() -> None:
    streams, unused = StandInStreams(), None
    graphs = StepGraphs(streams, unused, unused, (0, 16))  # type: ignore[arg-type]
    graphs._captured[GraphKind(False, 64)] = unused  # type: ignore[assignment]
    limits = LayoutLimits(100, 1 << 20, 1 << 16, 16)

    def padded(start: int, count: int) -> bool:
        blocks = np.arange(-(-(start + count) // 16), dtype="<i4").tobytes()
        piece = entry(0, start, *[1] * count)._replace(blocks=blocks)
        layout = build_layout(step(0, entry(1, 3, 5), piece), limits)
        return graphs.padded(layout, None) is not None

    assert padded(0, 60)
    assert padded(MAX_PAIRS // 16 - 16, 16)
    assert not padded(MAX_PAIRS // 16, 16)


def failing(monkeypatch: pytest.MonkeyPatch, rows: int, error: Exception) -> None:
    capture = StepGraphs._capture

    def fails(self: StepGraphs, kind: GraphKind) -> Any:
        if kind == GraphKind(False, rows):
            raise error
        return capture(self, kind)

    monkeypatch.setattr(StepGraphs, "_capture", fails)


def test_a_size_that_cannot_be_captured_is_named_and_left_out(
    model: Path,
    eager: OnStandIns,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing(monkeypatch, 64, torch.OutOfMemoryError("out of memory\nand more"))
    with caplog.at_level(logging.WARNING):
        worker = on_stand_ins(model, **LIMITS)
    line = "a step of 64 tokens with prompts cannot be captured as a CUDA graph: out of memory; "
    assert [each for each in caplog.messages if line in each]
    planned = worker.device.made[-1].planned
    count = len(planned)
    assert worker.run(step(0, prompt(0, 0, 8))).tokens == eager.run(step(0, prompt(0, 0, 8))).tokens
    assert planned[count:] == [-96], "the next size is used"
    assert worker.report.graphs == (96,)


def test_a_device_that_is_gone_after_a_failed_capture_ends_the_start(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 96, RuntimeError("an illegal memory access"))

    def gone(streams: StandInStreams) -> None:
        raise WorkerLost("the GPU failed")

    monkeypatch.setattr(StandInStreams, "synchronize", gone)
    with pytest.raises(WorkerLost, match="the GPU failed"):
        on_stand_ins(model, **LIMITS)


def test_ranks_do_not_leave_a_size_out_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 64, RuntimeError("out of memory"))
    changes = {**LIMITS, "dtype": "float32"}
    line = "a step of 64 tokens with prompts cannot be captured as a CUDA graph: out of memory"
    with pytest.raises(StartupError, match=line), gpus(model, 1, 2, changes, has_graphs=True):
        pass


def test_stages_and_ranks_replay_mixed_steps(model: Path, eager: OnStandIns) -> None:
    changes = {**LIMITS, "dtype": "float32"}
    steps = (
        step(0, prompt(0, 0, 8), prompt(1, 0, 5, samples=False)),
        step(1, entry(0, 8, 5), prompt(1, 5, 9)),
    )
    wanted = [eager.run(each).tokens for each in steps]
    for stages, ranks in ((2, 1), (1, 2)):
        with gpus(model, stages, ranks, changes, has_graphs=True) as (workers, devices):
            before = [sum(graph.num_replays for graph in each.of_it.graphs) for each in devices]
            assert [workers.run(each).tokens for each in steps] == wanted
            after = [sum(graph.num_replays for graph in each.of_it.graphs) for each in devices]
            assert [last - first for last, first in zip(after, before, strict=True)] == [2, 2]


def decodes(lengths: tuple[int, ...]) -> list[StepEntry]:
    return [entry(request, length - 1, 5) for request, length in enumerate(lengths)]
