from collections.abc import Callable
from dataclasses import replace
from math import inf

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.cost.model import CostModel
from engine.errors import InvalidRequest
from engine.iteration import Iteration
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.media import EncoderReport, EncoderWork, Media
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Abort, Request, RequestSpec
from engine.step import SampleSpec, SamplingParams, StepResult
from gateway.observe.explanation import explain, spans_of
from gateway.observe.timelines import Timelines
from tests.blank import blank

GREEDY = SamplingParams(temperature=0.0)
COST = CostModel.linear(per_step=0.01, per_token=0.001, per_slot=0.0)
ENCODER = EncoderReport(3, 100, row_flops=1, pair_flops=0, tile=4, merge=2)
WHOLE = replace(ENCODER, merge=0, is_whole=True)
SLICE = 0.002  # seconds


class Rig:
    """A scheduler whose iterations take as long as their entries and slices cost."""

    def __init__(self, encoder: EncoderReport | None = ENCODER, **bounds: float) -> None:
        settings = SchedulerSettings(max_model_len=400, **bounds)  # type: ignore[arg-type]
        self.timelines = Timelines()
        self.now = 0.0
        self.slice_seconds: Callable[[EncoderWork], float] = lambda _: SLICE
        self.scheduler = IterationScheduler(
            settings,
            KVLedger(KVShape(200, 4)),
            FirstComeFirstServed(),
            self.timelines,
            LiveCost(COST),
            encoder=encoder,
        )
        self.timelines.attach(self.scheduler)

    def add(self, *images: Media, length: int = 100, max_tokens: int = 100) -> Request:
        spec = RequestSpec((1,) * length, max_tokens, GREEDY, label="picture", media=images)
        return self.scheduler.add(spec, self.now)

    def step(self) -> Iteration | None:
        """Plan and commit an iteration; pixels are sent at once."""
        iteration, images = self.scheduler.plan(self.now), self.scheduler.images
        while (wanted := images.next_to_send()) is not None:
            images.sent(wanted[0])
            iteration = iteration or self.scheduler.plan(self.now)
        if iteration is None:
            return None
        step = iteration.step
        encoding = sum((w.stop - w.start) * self.slice_seconds(w) for w in step.encodes)
        seconds = encoding + (COST.step(step) if step.entries else 0.0)
        self.now += seconds
        tokens = tuple(7 for entry in step.entries if entry.sample is not None)
        result = StepResult(step.step_id, tokens, seconds, encoder_seconds=encoding)
        self.scheduler.commit(iteration, result, self.now)
        return iteration


def image(start: int, number: int = 0, patches: int = 40) -> Media:
    """An image of ten tiles, unless it has other `patches`."""
    digest = number.to_bytes(32, "big")
    return Media(start, patches // 4, digest, blank(patches, 1, 8), (1, 2, patches // 2))


def num_slices(iteration: Iteration | None) -> int:
    assert iteration is not None
    return sum(work.stop - work.start for work in iteration.step.encodes)


def test_beside_decodes_no_more_slices_are_computed_than_the_goal_leaves_time_for() -> None:
    rig = Rig(itl_goal=0.02)
    for _ in range(3):
        rig.add(length=4)
    rig.step()
    rig.add(image(2))
    counts, starts = list[int](), list[bool]()
    while not starts or not starts[-1]:
        began = rig.now
        iteration = rig.step()
        counts.append(num_slices(iteration))
        starts.append(any(len(entry.tokens) > 1 for entry in iteration.step.entries))  # type: ignore[union-attr]
        assert rig.now - began <= 0.02 + SLICE or starts[-1]
    assert sum(counts) == 40, "four layers of ten tiles"
    assert counts[:2] == [0, 1], "the pixels are sent, and how long a slice takes is measured"
    assert max(counts) <= 4
    assert len(counts) > 10


def test_nine_of_ten_iterations_meet_the_goal_where_some_slices_take_longer_than_most() -> None:
    """Predicted by their mean, the slices of each fifth iteration would exceed it."""
    rig = Rig(itl_goal=0.05)
    for _ in range(3):
        rig.add(length=4, max_tokens=390)
    rig.step()
    rig.add(image(2, patches=10_000))
    exceeded = list[bool]()
    while len(exceeded) < 200:
        slowdown = 1.3 if len(exceeded) % 5 == 0 else 1.0
        rig.slice_seconds = lambda _, slowdown=slowdown: slowdown * SLICE  # type: ignore[misc]
        began = rig.now
        assert num_slices(rig.step()) or len(exceeded) < 2
        exceeded.append(rig.now - began > 0.05)
    assert sum(exceeded[50:]) <= 15


def test_slices_of_layers_are_not_priced_as_those_that_embed_patches() -> None:
    rig = Rig(itl_goal=0.05)
    for _ in range(3):
        rig.add(length=4, max_tokens=390)
    rig.step()
    tiles = 100
    rig.slice_seconds = lambda work: SLICE if work.start >= tiles else SLICE / 4
    request = rig.add(image(2, patches=4 * tiles))
    while not request.output:
        began = rig.now
        rig.step()
        assert rig.now - began < 0.0501


def test_without_a_goal_neither_old_streams_nor_old_images_make_iterations_longer() -> None:
    """Iterations of decodes take at most twice as long with slices, and with the prompt's tokens,
    which wait longer for each of two images than a prompt may before the factor grows."""
    rig = Rig(max_prefill_slowdown=2.0)
    for _ in range(2):
        rig.add(length=4, max_tokens=390)
    while rig.now < 1.0:
        rig.step()
    request = rig.add(image(2, patches=400), image(110, 1, patches=400), length=220)
    longest = 0.0
    while not request.output:
        began = rig.now
        rig.step()
        longest = max(longest, rig.now - began)
    assert rig.now - request.times.arrived_at > 1.0
    decodes = COST.compute(2, 0)
    assert 1.5 * decodes < longest <= 2.0 * decodes + SLICE


def test_a_prompt_leaves_time_for_the_slice_beside_it() -> None:
    rig = Rig(max_prefill_slowdown=2.0)
    for _ in range(8):
        rig.add(length=4, max_tokens=390)
    rig.step()
    rig.slice_seconds = lambda _: 0.006
    rig.add(image(2, patches=1000), length=300)
    for _ in range(10):
        rig.step()  # the price of a slice is measured
    prompt = rig.add(length=300)
    both = list[float]()
    while not prompt.output:
        began = rig.now
        iteration = rig.step()
        assert iteration is not None
        if num_slices(iteration) and any(len(entry.tokens) > 1 for entry in iteration.step.entries):
            both.append(rig.now - began)
    assert len(both) > 20
    assert max(both) <= 2.0 * COST.compute(8, 0) + 1e-9


def test_without_decodes_an_iteration_encodes_for_a_tenth_of_a_second_at_most() -> None:
    rig = Rig()
    rig.add(image(2, patches=400))
    counts = [num_slices(rig.step()) for _ in range(6) if rig.scheduler.pool]
    assert counts[0] == 1
    assert 49 <= max(counts) <= 50


def test_a_request_starts_with_its_first_image_and_waits_for_the_next() -> None:
    rig = Rig()
    request = rig.add(image(10, 1), image(40, 2))
    spans = list[tuple[int, int]]()
    for _ in range(60):
        iteration = rig.step()
        if iteration is not None:
            spans += [(entry.start, len(entry.tokens)) for entry in iteration.step.entries]
        if request.output:
            break
    assert spans == [(0, 40), (40, 60)]


def test_what_nobody_waits_for_any_more_is_not_encoded_further_and_is_forgotten() -> None:
    rig = Rig()
    first = rig.add(image(2, 1, patches=400))
    for _ in range(3):
        rig.step()
    rig.scheduler.cancel(first, Abort.CLIENT_GONE, rig.now)
    assert rig.step() is None
    rig.add(image(2, 2))
    dropped = [rig.step() for _ in range(6)]
    assert [each.step.dropped for each in dropped if each is not None and each.step.dropped]


def test_a_prefix_in_the_cache_needs_no_encoding() -> None:
    rig = Rig()
    rig.add(image(10), max_tokens=4)
    while rig.step() is not None:
        pass
    again = rig.add(image(10), max_tokens=4, length=120)
    assert num_slices(rig.step()) == 0
    assert again.num_cached == 100


def test_the_repetition_penalty_does_not_read_the_tokens_that_stand_for_images() -> None:
    rig, media = Rig(), image(2)
    prompt = (3, 4, *[5] * media.num_tokens, 6)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    rig.scheduler.add(RequestSpec(prompt, 9, sampling, media=(media,)), rig.now)
    samples = list[SampleSpec]()
    while not samples:
        iteration = rig.step()
        if iteration is not None:
            samples = [entry.sample for entry in iteration.step.entries if entry.sample]
    assert [sample.prompt for sample in samples] == [(3, 4, 6)]


def test_the_time_waited_for_the_encoder_is_a_phase_of_its_own() -> None:
    rig = Rig()
    rig.add(image(2, patches=800), length=300, max_tokens=2)
    while rig.step() is not None:
        pass
    (timeline,) = rig.timelines.find("picture", "")
    phases = [span.phase for span in spans_of(timeline, rig.now)]
    assert phases[:3] == ["queued", "encoding", "prefill"]
    assert "for the image encoder" in explain([timeline], "", rig.timelines, rig.now)


@pytest.mark.parametrize("goal", [inf, 0.015])
def test_no_chunk_ends_within_an_image_that_is_computed_whole(goal: float) -> None:
    """Its 30 tokens are more than the goal allows beside a decode, and not more than fit."""
    rig = Rig(WHOLE, itl_goal=goal, max_batch_size=4, max_batch_tokens=40)
    rig.add(length=4)
    rig.step()
    images = [image(10, 1, patches=120), image(60, 2, patches=120), image(90, 3, patches=120)]
    request = rig.add(*images, length=150)
    chunks = list[tuple[int, int]]()
    while not request.output:
        iteration = rig.step()
        assert iteration is not None
        assert rig.scheduler.pool
        assert sum(len(entry.tokens) for entry in iteration.step.entries) <= 40
        for entry in iteration.step.entries:
            if len(entry.tokens) > 1:
                chunks.append((entry.start, entry.start + len(entry.tokens)))
    assert [start for start, _ in chunks[1:]] == [stop for _, stop in chunks[:-1]]
    assert chunks[-1][1] == 150
    for each in images:
        assert any(start <= each.start and each.end <= stop for start, stop in chunks)


def test_the_rest_of_an_image_behind_a_cached_prefix_is_computed_in_one_step() -> None:
    rig = Rig(WHOLE, max_batch_size=2, max_batch_tokens=40)
    rig.add(image(6, patches=120), length=40, max_tokens=2)
    while rig.step() is not None:
        pass
    again = rig.add(image(6, patches=120), length=22 + 14, max_tokens=2)
    iteration = rig.step()
    assert iteration is not None
    (entry,) = iteration.step.entries
    assert 6 < again.num_cached == entry.start
    assert entry.start + len(entry.tokens) == 36


def test_an_image_that_is_computed_whole_must_fit_beside_the_decodes() -> None:
    bounds = {"max_batch_size": 4, "max_batch_tokens": 32}
    with pytest.raises(InvalidRequest, match=r"30 tokens, .* needs --max-batch-tokens 33 beside"):
        Rig(WHOLE, **bounds).add(image(2, patches=120))
    assert Rig(ENCODER, **bounds).add(image(2, patches=120))


def test_images_are_refused_by_a_model_without_an_encoder_and_if_they_never_fit() -> None:
    with pytest.raises(InvalidRequest, match="does not read images"):
        Rig(None).add(image(2))
    with pytest.raises(InvalidRequest, match="--encoder-memory allows 500"):
        Rig(encoder_memory=500).add(image(2))
    assert Rig(encoder_memory=1000, itl_goal=inf).add(image(2))


def test_pixels_of_the_image_that_is_encoded_and_of_the_next_one_are_sent() -> None:
    rig = Rig()
    for number in range(4):
        rig.add(image(2, number))
    rig.scheduler.plan(0.0)
    images = rig.scheduler.images
    assert [images.next_to_send() is None for _ in range(3)] == [False, False, True]
