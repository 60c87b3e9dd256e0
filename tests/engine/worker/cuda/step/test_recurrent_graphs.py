from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.step import LAST_TOKEN, NO_STATE, StateSlots, StepEntry
from engine.worker.cuda.kernels.library import TritonKernels
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import RecurrentShape, RecurrentWeights, StateRuns
from tests.engine.worker.cuda.launching import OnStandIns, on_stand_ins
from tests.engine.worker.cuda.step.test_launcher import entry, step
from tests.models.checkpoints import make_checkpoint

LIMITS: dict[str, Any] = {"max_batch_size": 8, "max_batch_tokens": 64}
PROMPTS = [(7, 8, 9), (20, 3, 5, 1, 40), (11,)]


def recurrence(
    weights: RecurrentWeights, y: Tensor, state: tuple[Tensor, ...], runs: StateRuns
) -> Tensor:
    """Plain torch, with the runs that a kernel would read from the device's memory when it runs."""
    assert runs.on_device is not None
    rows, writes = (each.numpy().copy() for each in runs.on_device)
    assert (len(rows), len(writes)) == (3 * len(runs.runs), 2 * len(y))
    there = StateRuns(rows.reshape(-1, 3), writes.reshape(-1, 2))
    kept = there._replace(runs=there.runs[there.runs[:, 0] < there.runs[:, 1]])
    return TorchOperators().recurrence(weights)(y, state, kept)


def has_kernels(shape: RecurrentShape) -> bool:
    return True


KERNELS = TritonKernels(recurrence=SimpleNamespace(recurrence=recurrence, has_kernels=has_kernels))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["qwen3_5", "lfm2", "granite_hybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.fixture
def eager(model: Path) -> OnStandIns:
    return on_stand_ins(model, **LIMITS, cuda_graphs=False)


@pytest.fixture
def replaying(model: Path) -> OnStandIns:
    return on_stand_ins(model, KERNELS, **LIMITS)


def prompts() -> list[StepEntry]:
    return [
        entry(request, 0, *tokens)._replace(state=StateSlots(request, NO_STATE))
        for request, tokens in enumerate(PROMPTS)
    ]


def decode(request: int, more: int, *, slot: int, source: int) -> StepEntry:
    """The token behind the prompt and `more` others."""
    made = entry(request, len(PROMPTS[request]) + more, LAST_TOKEN)
    return made._replace(state=StateSlots(slot, source))


def num_replays(worker: OnStandIns) -> int:
    return sum(graph.num_replays for graph in worker.device.streams.graphs)


def states_of(worker: OnStandIns) -> list[Tensor]:
    states = worker.worker.parts.stage.states
    assert states is not None
    return list(states.tensors())


def test_decodes_replay_graphs_and_change_the_states_of_an_eager_worker(
    replaying: OnStandIns, eager: OnStandIns
) -> None:
    for states in zip(states_of(replaying), states_of(eager), strict=True):
        for each in states:
            each.fill_(7)
    steps = [
        prompts(),
        [decode(request, 0, slot=request, source=request) for request in range(3)],
        [decode(2, 1, slot=4, source=2), decode(0, 1, slot=0, source=0)],
    ]
    for number, entries in enumerate(steps):
        before = num_replays(replaying)
        found, wanted = (each.run(step(number, *entries)) for each in (replaying, eager))
        assert found.tokens == wanted.tokens
        assert num_replays(replaying) - before == int(number > 0)
        for one, other in zip(states_of(replaying), states_of(eager), strict=True):
            torch.testing.assert_close(one, other)
    assert replaying.report.graphs == ()


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_more_drafts_than_a_state_has_inputs_run_eagerly(
    replaying: OnStandIns, eager: OnStandIns, num_drafts: int
) -> None:
    for worker in (replaying, eager):
        worker.run(step(0, *prompts()))
    before = num_replays(replaying)
    first = entry(0, 3, 30)._replace(state=StateSlots(0, 0))
    drafts = [
        entry(0, 4 + number, 31 + number)._replace(state=StateSlots(4 + number, (0, 4, 5)[number]))
        for number in range(num_drafts)
    ]
    found, wanted = (each.run(step(1, first, *drafts)) for each in (replaying, eager))
    assert found.tokens == wanted.tokens
    for one, other in zip(states_of(replaying), states_of(eager), strict=True):
        torch.testing.assert_close(one, other)
    inputs = min(len(each[0]) for each in states_of(replaying) if each.ndim == 3)
    assert num_replays(replaying) - before == int(1 + num_drafts <= inputs)


def test_without_kernels_there_are_no_graphs(model: Path) -> None:
    assert on_stand_ins(model, **LIMITS).device.streams.graphs == []
