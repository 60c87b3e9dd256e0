from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.lora import LoraSpec
from engine.step import SampleSpec, Step, StepId, StepResult
from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerReport
from tests.engine.worker.cuda.launching import OnStandIns, on_stand_ins
from tests.engine.worker.process.driving import GREEDY, Driver, load_worker
from tests.models.checkpoints import make_checkpoint
from tests.models.loras import make_lora


@dataclass
class Launched:
    """The worker with each step launched and collected."""

    on_gpu: OnStandIns

    @property
    def report(self) -> WorkerReport:
        return self.on_gpu.worker.report

    def run(self, step: Step) -> StepResult:
        return self.on_gpu.launch(step).collect().result

    def logits(self, step: Step) -> None:
        raise AssertionError("not through the launcher")


def decode(driver: Driver, loras: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Tokens and log-probabilities of a prompt and decodes of one request for each adapter."""
    spec = SampleSpec(GREEDY, logprobs=0)
    feeds = [[3 + i, 7, 11] for i in range(len(loras))]
    found = []
    for number in range(count):
        entries = tuple(
            driver.entry(i, feed, spec)._replace(lora_id=lora_id)
            for i, (feed, lora_id) in enumerate(zip(feeds, loras, strict=True))
        )
        tokens = driver.worker.run(Step(StepId(number), entries)).tokens
        feeds = [[token] for token in tokens]
        found.append(tokens)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "base")
    for lora_id in (1, 2):
        make_lora(tmp_path / str(lora_id), seed=lora_id)
    return tmp_path


def load_both(worker: Worker, folder: Path) -> None:
    for lora_id in (1, 2):
        spec = LoraSpec(lora_id, "it", str(folder / str(lora_id)))
        assert worker.load_lora(spec).error == ""


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_those_of_the_cpu(folder: Path, cuda_graphs: bool) -> None:
    cpu = load_worker(folder / "base")
    on_gpu = on_stand_ins(folder / "base", cuda_graphs=cuda_graphs, max_batch_size=6)
    load_both(cpu, folder)
    load_both(on_gpu.worker, folder)

    def num_replays() -> int:
        return sum(graph.num_replays for graph in on_gpu.device.streams.graphs)

    before = num_replays()
    for loras in ((1, 1, 2), (0, 1, 2), (0, 0, 0, 0, 2)):
        expected = decode(Driver(cpu), loras, 6)
        assert decode(Driver(Launched(on_gpu)), loras, 6) == expected
    assert num_replays() == before
    assert decode(Driver(Launched(on_gpu)), (0, 0), 6) == decode(Driver(cpu), (0, 0), 6)
    assert num_replays() - before == (6 if cuda_graphs else 0)
