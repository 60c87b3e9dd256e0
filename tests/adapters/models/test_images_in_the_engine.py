"""Requests with images in the whole engine: what it reuses, and what fails alone. No disturbance
changes an output: `tests.fuzz.images`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.errors import RowFailed
from engine.media import ImagePixels
from engine.request import RequestSpec
from engine.step import SamplingParams, Step, StepResult
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.process.images import WorkerImages
from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerReport, WorkerSettings
from tests.engine.worker.process.driving import settings_for
from tests.inline import RequestOutcome, play
from tests.models.images import Prompt, make_checkpoint, picture
from tests.worker_settings import changed

# One variant of each kind of positions, states and attention.
VARIANTS = ("qwen3_vl", "qwen3_5", "gemma3", "gemma4", "gemma4_whole", "smolvlm")
GREEDY = SamplingParams(temperature=0.0)
NEW_TOKENS = 12
BEFORE = [5, 6, 7, 8, 9, 10, 92]


@dataclass
class Watched:
    """A worker, the steps that it ran, and their results."""

    worker: Worker
    steps: list[Step] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    @property
    def report(self) -> WorkerReport:
        return self.worker.report

    @property
    def num_slices(self) -> int:
        """The slices of images that were computed."""
        return sum(work.stop - work.start for step in self.steps for work in step.encodes)

    def put_pixels(self, piece: ImagePixels) -> None:
        self.worker.put_pixels(piece)

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.results.append(self.worker.run(step))
        return self.results[-1]


@dataclass(frozen=True)
class Served:
    """A worker with host memory, and the output of each request alone."""

    settings: WorkerSettings
    worker: Worker
    specs: tuple[RequestSpec, ...]
    expected: list[list[int]]
    num_tokens: int  # of an image
    num_slices: int

    @property
    def is_whole(self) -> bool:
        """Whether a step computes all tokens of an image."""
        encoder = self.worker.report.encoder
        return encoder is not None and encoder.is_whole

    def least(self, max_batch_tokens: int) -> int:
        """So many tokens in a step, or as many as a whole image needs."""
        return max(max_batch_tokens, self.num_tokens + 3) if self.is_whole else max_batch_tokens


def tokens(outcomes: Sequence[RequestOutcome]) -> list[list[int]]:
    return [outcome.tokens for outcome in outcomes]


@pytest.fixture(scope="module", params=VARIANTS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    variant = str(request.param)
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), variant)
    settings = changed(settings_for(directory, "cpu"), host_kv_memory=1 << 18)
    worker = Worker.load(settings, lambda *_: None)
    first, second = picture(variant, 4, 6), picture(variant, 4, 6, seed=1)  # of the same tokens
    prompts = (
        Prompt.of(BEFORE, first, [93, 11, 12]),
        Prompt.of(BEFORE, second, [93, 11, 12]),
        Prompt.of(BEFORE, first, [93, 11, 12, 13], second, [14, 15]),
        Prompt.of([20, 21, 22, 23, 24]),
    )
    specs = [RequestSpec(each.tokens, NEW_TOKENS, GREEDY, media=each.media) for each in prompts]
    alone = [tokens(play(worker, [each]))[0] for each in specs]
    assert alone[0] != alone[1], "the images decide"
    assert worker.report.encoder is not None
    num_slices = worker.report.encoder.num_slices(first.rows * first.columns)
    return Served(settings, worker, tuple(specs), alone, first.num_tokens, num_slices)


def test_two_images_share_no_kv_and_the_same_image_is_encoded_and_computed_once(
    served: Served,
) -> None:
    watched = Watched(served.worker)
    outcomes = play(watched, served.specs, max_batch_size=1, max_batch_tokens=served.least(8))
    assert tokens(outcomes) == served.expected
    first, second, third, _ = (outcome.request for outcome in outcomes)
    assert first.num_cached == 0
    assert second.num_cached < len(BEFORE)
    assert third.num_cached > len(BEFORE)
    assert watched.num_slices == 2 * served.num_slices


def test_the_seconds_of_slices_are_not_those_of_the_tokens_beside_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that advances by a second whenever it is read, which it is before and after."""
    clock = SimpleNamespace(monotonic=map(float, count()).__next__)
    monkeypatch.setattr("engine.worker.cpu.transfers.time", clock)
    watched = Watched(served.worker)
    both = [served.specs[3], served.specs[0]]
    play(watched, both, max_batch_size=2, max_batch_tokens=served.least(8))
    beside = [each for each in watched.results if each.encoder_seconds and each.tokens]
    assert beside
    assert {each.encoder_seconds for each in beside} == {1.0}
    assert min(each.seconds for each in beside) > 2.0


def test_the_first_image_needs_no_kernel_that_is_not_loaded_yet(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first start of a version each would be compiled while all streams wait."""
    used, run = set[int](), NativeThreadPool.run

    def watched(pool: NativeThreadPool, kernel: int, operands: int, chunks: int) -> None:
        used.add(kernel)
        run(pool, kernel, operands, chunks)

    monkeypatch.setattr(NativeThreadPool, "run", watched)
    worker = Worker.load(served.settings, lambda *_: None)
    warm, images = used.copy(), worker.parts.images
    for piece in served.specs[0].media[0].pieces(1000):
        images.put(piece)
    used.clear()
    with torch.inference_mode(), worker.parts.device.pool.awake():
        assert images.encoding(1000) is not None
    assert used <= warm
    assert used


def test_encodings_are_dropped_when_they_do_not_fit(served: Served) -> None:
    encoder = served.worker.report.encoder
    assert encoder is not None
    watched = Watched(served.worker)
    outcomes = play(
        watched,
        served.specs[:2] * 2,
        max_batch_size=1,
        max_batch_tokens=served.least(8),
        encoder_memory=served.num_tokens * encoder.row_bytes,
        reuses_prefixes=False,
    )
    assert tokens(outcomes) == served.expected[:2] * 2
    dropped = {image for step in watched.steps for image in step.dropped}
    assert dropped
    assert not dropped & served.worker.parts.images._images.keys()


def test_an_image_that_cannot_be_encoded_fails_its_request_only(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_steps = WorkerImages.run

    def run(images: WorkerImages, step: Step) -> tuple[int, ...]:
        for number, start, _ in step.encodes:
            if number == 1 and start:
                images._images[number].state = None  # so that its next slice raises
                images._images[number].pixels = bytearray(7)
        return from_steps(images, step)

    monkeypatch.setattr(WorkerImages, "run", run)
    outcomes = play(served.worker, served.specs, max_batch_size=4, max_batch_tokens=served.least(8))
    whole = [outcome.tokens for outcome in outcomes if outcome.error is None]
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert [type(error) for error in failed] == [RowFailed, RowFailed], "two have the image"
    assert whole == [served.expected[1], served.expected[3]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_after_a_restart_the_image_of_a_chat_is_neither_encoded_nor_computed_again(
    tmp_path: Path, variant: str
) -> None:
    model = make_checkpoint(tmp_path / "model", variant)
    changes = {"disk_kv": str(tmp_path / "disk"), "disk_kv_memory": 4 << 20, "num_states": 12}
    settings = changed(settings_for(model, "cpu", kv_slots=2048), **changes)
    image, other = picture(variant, 4, 6), picture(variant, 4, 6, seed=1)
    text = [*range(20, 40)]
    turns = [Prompt.of(BEFORE, each, text, [93, 11]) for each in (image, image, other)]
    outputs, encoded = [], []
    for turn in turns:
        watched = Watched(Worker.load(settings, lambda *_: None))
        spec = RequestSpec(turn.tokens, 4, GREEDY, media=turn.media, logprobs=0)
        (outcome,) = play(watched, [spec])
        outputs.append((outcome.tokens, outcome.logprobs))
        encoded.append(watched.num_slices > 0)
        watched.worker.parts.kept.close()
    assert encoded == [True, False, True]
    assert outputs[0] == outputs[1] != outputs[2]
