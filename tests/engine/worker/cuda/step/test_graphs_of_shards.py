from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import StartupError, WorkerLost
from engine.step import (
    LAST_TOKEN,
    PromptTargets,
    RequestId,
    SampleSpec,
    SamplingParams,
    Step,
    StepEntry,
    StepId,
)
from engine.worker.cuda.step.graphs import graph_sizes
from engine.worker.launched import StepInFlight
from engine.worker.model.stage import Stage
from engine.worker.ports import RaggedLayout
from engine.worker.process.worker import Worker
from tests.engine.worker.cuda.fleet import Watched, gpus
from tests.engine.worker.cuda.standin import StandInStreams
from tests.engine.worker.cuda.step.test_launcher import entry, step
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.engine.worker.process.fleet import Fleet
from tests.models.checkpoints import make_checkpoint

LIMITS = {"dtype": "float32", "max_batch_size": 4, "max_batch_tokens": 16}
PENALISED = SampleSpec(SamplingParams(temperature=0.0, presence_penalty=1.5))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[tuple[Fleet, list[Watched]]]:
    with gpus(model, 1, 2, LIMITS, has_graphs=True) as found:
        yield found


def replays(devices: list[Watched]) -> list[int]:
    return [sum(graph.num_replays for graph in device.of_it.graphs) for device in devices]


@pytest.mark.parametrize(("stages", "num_ranks"), [(2, 1), (1, 2), (2, 2)])
def test_shards_replay_graphs_and_generate_what_one_worker_does(
    model: Path, stages: int, num_ranks: int
) -> None:
    alone = Driver(load_worker(model), seed=1)
    with gpus(model, stages, num_ranks, LIMITS, has_graphs=True) as (workers, devices):
        sizes = len(graph_sizes(4))
        num_graphs = sizes + 1  # with one of prompts
        assert [len(device.of_it.graphs) for device in devices] == [num_graphs] * len(devices)
        before = replays(devices)
        together = Driver(workers, seed=1)
        for request, prompt in ((0, (5, 6, 7)), (1, (9,) * 11)):
            wanted = alone.generate(request, prompt, 6)
            assert together.generate(request, prompt, 6) == wanted
        pieces = (0, (4,), GREEDY), (1, (8,), GREEDY)
        assert together.tokens(*pieces) == alone.tokens(*pieces)
        assert [after - first for after, first in zip(replays(devices), before, strict=True)] == [
            6 + 6 + 1
        ] * len(devices)


def test_hidden_states_that_are_sent_are_not_overwritten_by_later_replays(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(model, 2, 1, LIMITS, has_graphs=True) as (workers, _):
        stage, plain = workers.workers[0].parts.stage, Stage.run
        sent: list[tuple[Tensor, Tensor]] = []

        def run(self: Stage, layout: RaggedLayout, *more: Any) -> Tensor:
            hidden = plain(self, layout, *more)
            if self is stage:
                sent.append((hidden, hidden.clone()))
            return hidden

        monkeypatch.setattr(Stage, "run", run)
        Driver(workers, seed=1).generate(0, (5, 6, 7), 4)
    assert len(sent) == 4
    assert all(torch.equal(*pair) for pair in sent)


def test_ranks_launch_a_step_before_the_tokens_of_the_last_are_read(
    ranks: tuple[Fleet, list[Watched]], model: Path
) -> None:
    workers, _ = ranks
    plain = load_worker(model)
    (one,) = plain.run(step(0, entry(0, 0, 7, 8, 9))).tokens
    told = SampleSpec(PENALISED.sampling, output=(one,))
    (two,) = plain.run(step(1, entry(0, 3, one, spec=told))).tokens
    steps = (
        step(0, entry(0, 0, 7, 8, 9, spec=PENALISED)),
        step(1, entry(0, 3, LAST_TOKEN, spec=PENALISED._replace(continues=True))),
    )

    def launch_both(worker: Worker) -> list[StepInFlight]:
        return [worker.launch(each) for each in steps]

    launched = workers.on_all(launch_both)
    assert all(one.may_wait for each in launched for one in each)
    results = [[one.collect().result.tokens for one in each] for each in launched]
    assert results == [[(one,), (two,)], [(), ()]], "rank 0 has the result"


def test_ranks_compute_prompt_logprobs_and_prompt_pieces_together(
    ranks: tuple[Fleet, list[Watched]], model: Path
) -> None:
    workers, _ = ranks
    scored = entry(1, 0, 5, 6, 7)._replace(prompt_logprobs=PromptTargets(2, 0, (6, 7)))
    piece = entry(2, 0, 4, 3, spec=None)
    wanted = load_worker(model).run(step(3, scored, piece))
    found = workers.on_all(lambda worker: worker.run(step(3, scored, piece)))[0]
    assert found.tokens == wanted.tokens
    for mine, other in zip(found.prompt_logprobs[0], wanted.prompt_logprobs[0], strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_step_that_no_rank_can_begin_fails_alone(ranks: tuple[Fleet, list[Watched]]) -> None:
    workers, _ = ranks
    bad = step(4, entry(2, 0, 1000))

    def launch(worker: Worker) -> str:
        with pytest.raises(ValueError, match="token ids out of range"):
            worker.launch(bad)
        return "failed"

    assert workers.on_all(launch) == ["failed", "failed"]
    assert workers.run(step(5, entry(2, 0, 5, 6))).tokens


def test_a_rank_that_fails_while_others_wait_for_it_ends_the_worker(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gpus(model, 1, 2, LIMITS, has_graphs=True) as (workers, _):
        first = workers.workers[0]

        def fails(*_: object) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(Stage, "read", fails)
        with pytest.raises(WorkerLost, match=r"step 6 failed while other ranks wait .* out of mem"):
            first.launch(step(6, entry(0, 0, 5)))


def test_what_cannot_be_captured_is_named_with_the_flag_that_helps(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(streams: object, work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(StandInStreams, "capture", fails)
    line = (
        "a step of 4 decodes cannot be captured as a CUDA graph: operation not permitted "
        "when stream is capturing; --no-cuda-graphs runs steps without graphs"
    )
    with pytest.raises(StartupError, match=line), gpus(model, 2, 1, LIMITS, has_graphs=True):
        pass
    with gpus(model, 1, 1, {**LIMITS, "cuda_graphs": False}, has_graphs=True) as (workers, _):
        assert workers.run(Step(StepId(0), (StepEntry(RequestId(0), 0, (5,), bytes(4), None),)))
