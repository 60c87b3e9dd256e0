from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.errors import StartupError
from engine.media import ImagePixels
from engine.request import RequestSpec
from engine.step import SamplingParams, Step, StepResult
from engine.worker.model.torch_operators import TorchOperators
from engine.worker.ports import Shard
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import WorkerReport
from tests.engine.worker.process.driving import load_worker
from tests.engine.worker.process.fleet import Fleet, fleet
from tests.inline import RequestOutcome, play
from tests.models.images import Prompt, make_checkpoint, picture

GREEDY = SamplingParams(temperature=0.0)
WHOLE = ("gemma3", "gemma4_whole")  # images in one step


@dataclass(frozen=True)
class FedFleet:
    """A fleet whose first stage gets the pixels of images, as it does from an executor."""

    workers: Fleet

    @property
    def report(self) -> WorkerReport:
        return self.workers.report

    def put_pixels(self, piece: ImagePixels) -> None:
        for worker in self.workers.workers:
            if worker.parts.placement.stage == 0:
                worker.put_pixels(piece)

    def run(self, step: Step) -> StepResult:
        return self.workers.run(step)


def specs(variant: str) -> list[RequestSpec]:
    one, other = picture(variant, 4, 6), picture(variant, 6, 6, seed=1)
    prompts = (
        Prompt.of([5, 6, 92], one, [93, 7, 8]),
        Prompt.of([5, 6, 92], other, [9], one, [10, 11]),
        Prompt.of([12, 13, 14, 15]),
    )
    return [RequestSpec(each.tokens, 10, GREEDY, media=each.media) for each in prompts]


def tokens(outcomes: list[RequestOutcome]) -> list[list[int]]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.tokens for outcome in outcomes]


@pytest.mark.parametrize(
    ("variant", "stages", "ranks"),
    [
        ("qwen3_vl", 1, 2),
        ("smolvlm", 2, 1),
        ("qwen3_5", 1, 2),
        ("gemma3", 2, 1),
        ("gemma4", 1, 2),
        ("gemma4_whole", 2, 1),
    ],
)
def test_outputs_are_those_of_one_worker(
    tmp_path: Path, variant: str, stages: int, ranks: int
) -> None:
    make_checkpoint(tmp_path, variant)
    asked = specs(variant)
    whole = max(media.num_tokens for spec in asked for media in spec.media) + 1
    bounds = {"max_batch_size": 2, "max_batch_tokens": whole if variant in WHOLE else 8}
    expected = tokens(play(load_worker(tmp_path), asked, **bounds))  # type: ignore[arg-type]
    with fleet(tmp_path, stages, ranks) as workers:
        outcomes = play(FedFleet(workers), asked, **bounds)  # type: ignore[arg-type]
    assert tokens(outcomes) == expected


def test_a_first_stage_with_too_few_layers_for_deepstack_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(make_checkpoint(tmp_path, "qwen3_vl")))
    weights = checkpoint.open_weights(torch.float32, lambda *_: None)
    first = Shard(checkpoint.family.shape, range(2))
    with pytest.raises(StartupError, match="behind the first 2 layers; the first stage has 2"):
        checkpoint.family.build(weights, first, TorchOperators())
