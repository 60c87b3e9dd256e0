"""Cases whose prompts have images: what stands for an image must be computed with its encoding.

The digests of a text have the images of its prompt in them, so KV of another image is seen when it
is read. `python -m tests.fuzz.engine.images FIRST LAST` plays more cases.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from engine.control import images
from engine.media import EncoderReport, ImagePixels, Media, Pixels
from tests.fuzz.engine.case import Case
from tests.fuzz.engine.clients import Clients
from tests.fuzz.engine.device import Device
from tests.fuzz.engine.drawing import Settings, draw
from tests.fuzz.engine.wrong import Wrong
from tests.fuzz.playing import main

if TYPE_CHECKING:
    from random import Random

    from engine.request import RequestSpec
    from engine.step import Step, StepEntry, StepResult
    from tests.fuzz.engine.reading import Reader

PLACEHOLDER = 5
NUM_LAYERS, TILE = 2, 8
PICTURES = ((2, 2), (4, 6), (6, 4), (2, 8), (8, 8))  # rows and columns of patches
ROW_BYTES = 100
MAX_TOKENS = max(rows * columns // 4 for rows, columns in PICTURES)


def picture(number: int, start: int) -> Media:
    """Picture `number` at a place of a prompt; its pixels say which one it is."""
    rows, columns = PICTURES[number]
    levels = np.full((rows * columns, 1, 8), number, dtype=np.uint8)
    pixels = Pixels(levels, np.zeros((1, 256), np.float32))
    digest = (number + 1).to_bytes(32, "little")
    return Media(start, rows * columns // 4, digest, pixels, (1, rows, columns))


@dataclass(slots=True)
class _Image:
    """What the worker has of an image."""

    number: int  # of the picture
    num_missing: int  # bytes
    num_slices: int
    num_done: int = 0
    num_planned: int = 0  # also by steps that failed


@dataclass(slots=True)
class ImageDevice(Device):
    """Remembers which images were sent and encoded, and checks what entries read of them."""

    report: EncoderReport | None = None
    images: dict[int, _Image] = field(default_factory=dict)

    def put(self, piece: ImagePixels) -> None:
        """A piece of an image has arrived."""
        assert self.report is not None
        if not piece.offset:
            num_slices = self.report.num_slices(piece.shape[0])
            self.images[piece.image] = _Image(piece.data[0], prod(piece.shape), num_slices)
        if piece.image in self.images:
            self.images[piece.image].num_missing -= len(piece.data)

    def lose(self) -> None:
        Device.lose(self)
        self.images.clear()

    def fail(self, step: "Step", *, has_moved: bool) -> None:
        Device.fail(self, step, has_moved=has_moved)
        for number, _, stop in step.encodes:
            if number in self.images:
                self.images[number].num_planned = stop

    def run(self, step: "Step") -> "StepResult":
        for number in step.dropped:
            self.counts["dropped images"] += 1
            self.images.pop(number, None)
        for number, start, stop in step.encodes:
            image = self.images.get(number)
            if image is None or image.num_missing or image.num_done > start:
                raise Wrong(f"slices {start} to {stop} of image {number}: {image}")
            image.num_done = image.num_planned = stop
            self.counts["slices"] += stop - start
            self.counts["encoded"] += stop == image.num_slices
            self.counts["split images"] += stop < image.num_slices
        for entry in step.entries:
            if entry.request_id not in self._failed:
                self._check_media(entry)
        result = Device.run(self, step)
        return replace(result, encoder_seconds=1e-4 * bool(step.encodes))

    def _check_media(self, entry: "StepEntry") -> None:
        spec, stop = self.texts[entry.request_id].spec, entry.start + len(entry.tokens)
        expected: list[tuple[int, int, int, int]] = []
        for media in spec.media:
            first, last = max(media.start, entry.start), min(media.end, stop)
            if first < last:
                self._check_end(entry, media.end, stop)
                number = int(media.pixels.levels[0, 0, 0])
                expected.append((number, first - entry.start, first - media.start, last - first))
        rows = () if entry.media is None else entry.media.rows
        found = []
        for image, offset, first, num_rows in rows:
            known = self.images.get(image)
            if known is None or known.num_missing or known.num_planned < known.num_slices:
                raise Wrong(f"request {entry.request_id} reads image {image}: {known}")
            found.append((known.number, offset, first, num_rows))
        if found != expected:
            raise Wrong(f"request {entry.request_id} reads {found}, not {expected}")
        self.counts["image rows"] += sum(each[3] for each in found)
        self._check_positions(entry, spec)

    def _check_end(self, entry: "StepEntry", image_end: int, stop: int) -> None:
        """No entry ends within an image that is computed whole."""
        if self.report is None or not self.report.is_whole:
            return
        if stop < image_end:
            raise Wrong(f"request {entry.request_id} ends within an image, at {stop}")
        self.counts["whole images"] += 1

    def _check_positions(self, entry: "StepEntry", spec: "RequestSpec") -> None:
        assert self.report is not None
        stop = entry.start + len(entry.tokens)
        expected = positions_of(spec, stop, self.report.merge)[entry.start :]
        media = entry.media
        shift = 0 if media is None else media.shift
        found = [(place + shift,) * 3 for place in range(entry.start, stop)]
        if media is not None and media.positions:
            axes = np.frombuffer(media.positions, dtype="<i4").reshape(3, -1)
            found = [(int(one), int(two), int(three)) for one, two, three in axes.T]
        if found != expected:
            raise Wrong(f"request {entry.request_id} has positions {found}, not {expected}")


def positions_of(spec: "RequestSpec", count: int, merge: int) -> list[tuple[int, int, int]]:
    """The positions of the first tokens of a request, one after the other."""
    starts = {media.start: media for media in spec.media} if merge else {}
    positions: list[tuple[int, int, int]] = []
    following = 0
    while len(positions) < count:
        media = starts.get(len(positions))
        if media is None:
            positions.append((following,) * 3)
            following += 1
            continue
        rows, columns = media.grid[1] // merge, media.grid[2] // merge
        for row in range(rows):
            for column in range(columns):
                positions.append((following, following + row, following + column))
        following += max(rows, columns)
    return positions[:count]


class ImageCase(Case):
    """One case, most of whose requests have images."""

    def _draw_settings(self) -> Settings:
        settings = draw(self.random)
        while not settings.windows or not settings.scheduler.chunks_prompts:
            settings = draw(self.random)
        merge = self.random.choice([0, 2])
        bounds = settings.scheduler
        fits = MAX_TOKENS + bounds.max_batch_size - 1 <= bounds.max_batch_tokens
        is_whole = self.random.choice([False, fits])
        self._report = EncoderReport(NUM_LAYERS, ROW_BYTES, 10, 1, TILE, merge, is_whole)
        size = self.random.choice([16, 24, 40, 10_000]) * ROW_BYTES
        return replace(settings, scheduler=replace(settings.scheduler, encoder_memory=size))

    def _draw_encoder(self) -> EncoderReport:
        return self._report

    def _make_device(self, reader: "Reader") -> ImageDevice:
        rates, report = self.settings.rows, self._report
        watch, random, counts = self._watch, self.random, self.counts
        self._images = ImageDevice(reader, watch.texts, rates, random, counts, report=report)
        return self._images

    def _check(self, step: "Step", in_flight: "list[Step]") -> None:
        Case._check(self, step, in_flight)
        cache = self.scheduler.images._cache
        assert cache is not None
        encoded = sum(image.num_bytes for image in cache if cache.is_encoded(image))
        if encoded != cache.num_bytes:
            raise Wrong(f"{encoded} bytes are encoded, not {cache.num_bytes}")

    async def _put_pixels(self, piece: ImagePixels) -> None:
        self._images.put(piece)

    def _make_clients(self) -> "ImageClients":
        return ImageClients(self.settings, self.random, self.counts)


class ImageClients(Clients):
    """Put images into the prompts of other clients."""

    def draw_spec(self) -> "RequestSpec":
        spec = Clients.draw_spec(self)
        prompt, media = _with_images(spec.prompt, self._random)
        return replace(spec, prompt=prompt, media=media)


def _with_images(
    prompt: tuple[int, ...], random: "Random"
) -> tuple[tuple[int, ...], tuple[Media, ...]]:
    """The prompt with up to three images in place of some of its tokens."""
    tokens, media, at = list(prompt), list[Media](), 0
    for _ in range(random.choice([0, 1, 1, 2, 3])):
        each = picture(random.randrange(len(PICTURES)), at + random.choice([0, 1, 3, 10]))
        if each.end > len(tokens):
            break
        tokens[each.start : each.end] = [PLACEHOLDER] * each.num_tokens
        media.append(each)
        at = each.end
    return tuple(tokens), tuple(media)


@contextmanager
def sliced(random: "Random") -> Iterator[None]:
    """Iterations that nothing bounds compute few slices of an image, or all."""
    usual = images.FREE_SECONDS
    images.FREE_SECONDS = random.choice([1e-9, 1e-5, usual])
    try:
        yield
    finally:
        images.FREE_SECONDS = usual


def play(seed: int, counts: "Counter[str]") -> None:
    """Play the case of a seed, and count what happened in it."""
    case = ImageCase(seed)
    with sliced(case.random):
        case.play()
    counts.update(case.counts)


if __name__ == "__main__":
    main(play)
