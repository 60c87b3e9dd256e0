"""Images: which images are encoded, and how much of that the next iteration computes.

An image is encoded before the first of its tokens is computed, in slices, each of some patches in
one layer: an iteration computes as many as its bound of time leaves, and at least one. Images are
encoded one after the other, in the order of the requests that need them. A request computes the
tokens before an image that is not encoded, and waits there; it starts when the first image is
encoded. Where the tokens of an image attend to each other, a chunk of the prompt ends before the
image or behind it, even if the image takes longer than the iteration's bound. Prefixes in the
cache need no encoding: what is encoded is only what will be computed.

Pixels are sent to the workers once, before the first slice and not long before, and again if a
worker has died: then everything is computed anew from the pixels, which the request holds.

The positions along three axes that RoPE turns the tokens of a prompt with images by (M-RoPE).
Text has the same position on all axes. An image has the position of the token before it plus one on
the first axis, and the rows and columns of its tokens are added to that on the others. What follows
has the largest position so far plus one on all axes, so positions fall behind the tokens' numbers:
text behind the images has its number plus a shift.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, product
from typing import NamedTuple

from engine.control.image_cache import CachedImage, ImageCache
from engine.control.settings import SchedulerSettings
from engine.cost.live import NEWS_SHARE, PredictionErrors
from engine.errors import InvalidRequest
from engine.iteration import Iteration
from engine.media import EncoderReport, EncoderWork, EntryMedia, ImageRows, Media
from engine.request import Request, RequestSpec
from engine.step import StepResult


class RopePositions(NamedTuple):
    """The positions of a prompt; those behind the last image, and of the output, are shifted
    numbers."""

    axes: "tuple[array[int], array[int], array[int]]"  # up to the end of the last image
    shift: int

    @property
    def stop(self) -> int:
        """The end of the last image."""
        return len(self.axes[0])

    @classmethod
    def of(cls, media: tuple[Media, ...], merge: int) -> "RopePositions":
        """`merge` is the number of patches along each side that one token stands for."""
        axes, start, position = (array("i"), array("i"), array("i")), 0, 0
        for image in media:
            text = range(position, position + image.start - start)
            position = text.stop
            frames, rows, columns = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
            sides = [range(position, position + size) for size in (frames, rows, columns)]
            for axis, places in zip(axes, zip(*product(*sides), strict=True), strict=True):
                axis.extend(text)
                axis.extend(places)
            position += max(frames, rows, columns)
            start = image.end
        return cls(axes, position - start)

    def between(self, start: int, stop: int) -> bytes:
        """The positions of tokens `[start, stop)` as in `EntryMedia`."""
        behind = range(max(start, self.stop) + self.shift, stop + self.shift)
        parts = [axis[start : min(stop, self.stop)] + array("i", behind) for axis in self.axes]
        return b"".join([part.tobytes() for part in parts])


# fixed: how long a cancel may take, and so the slices of an iteration that nothing bounds
FREE_SECONDS = 0.1
NUM_SENT = 2  # fixed: while one is encoded, the next one arrives; workers hold no more pixels


@dataclass(slots=True)
class EncoderRate:
    """What an operation of the encoder takes, by the latest slices."""

    seconds_per_flop: float = 0.0  # 0: not measured
    num_measured: int = 0  # iterations

    def observe(self, latest: float) -> None:
        """The mean of the first iterations; the latest ones count more than those long ago."""
        self.num_measured += 1
        share = max(NEWS_SHARE, 1.0 / self.num_measured)
        self.seconds_per_flop += share * (latest - self.seconds_per_flop)


class Images:
    """The images of all requests to a model with an encoder; to others, they are refused."""

    def __init__(self, encoder: EncoderReport | None, settings: SchedulerSettings) -> None:
        self._encoder = encoder
        self._settings = settings
        self._max_bytes = settings.encoder_memory
        self._cache = None if encoder is None else ImageCache(encoder, self._max_bytes)
        self._wanted: dict[int, CachedImage] = {}  # in this plan, in the order of the policy
        self._live: dict[Request, RopePositions | None] = {}  # requests with images
        self._num_dropped = 0  # before this plan
        self._now = 0.0
        self._rates = [EncoderRate(), EncoderRate()]  # embedding patches, and layers
        self._errors = PredictionErrors()  # seconds of an iteration's slices
        self.slice_seconds = 0.0  # one slice, if the last iteration had any: the next one will
        self.num_encoded = 0  # images, since the start

    @property
    def num_bytes(self) -> int:
        """Bytes of the encodings that are kept."""
        return 0 if self._cache is None else self._cache.num_bytes

    @property
    def num_live(self) -> int:
        """Requests with images that have not ended. One may load KV and then wait for an image."""
        return len(self._live)

    # Requests

    def check(self, spec: RequestSpec) -> None:
        """Raise `InvalidRequest` if the model cannot read the images of a request."""
        if not spec.media:
            return
        if self._encoder is None:
            raise InvalidRequest("This model does not read images.")
        largest = max(each.num_tokens for each in spec.media) * self._encoder.row_bytes
        if largest > self._max_bytes:
            raise InvalidRequest(
                f"An image of this request has {largest:,} bytes when it is encoded; "
                f"--encoder-memory allows {self._max_bytes:,}."
            )
        if self._encoder.is_whole:
            self._check_whole(max(each.num_tokens for each in spec.media))

    def _check_whole(self, num_tokens: int) -> None:
        """Raise `InvalidRequest` if an image does not fit into an iteration beside the decodes."""
        seats = self._settings.max_batch_size
        if num_tokens + seats - 1 > self._settings.max_batch_tokens:
            raise InvalidRequest(
                f"An image of this request is {num_tokens:,} tokens, which this model computes in "
                f"one step; that needs --max-batch-tokens {num_tokens + seats - 1:,} beside "
                f"--max-batch-size {seats}."
            )

    def arrive(self, request: Request) -> None:
        """A request with images was accepted."""
        assert self._encoder is not None, "checked before"
        assert self._cache is not None, "checked before"
        self._cache.arrive(request)
        merge = self._encoder.merge
        self._live[request] = RopePositions.of(request.spec.media, merge) if merge else None

    def leave(self, request: Request) -> None:
        """A request has ended, or goes to another scheduler."""
        if self._cache is not None and request in self._live:
            del self._live[request]
            self._cache.leave(request)

    # Planning

    def begin_plan(self, now: float) -> None:
        """Forget which images the last plan wanted, and the requests that have ended."""
        self._now = now
        self._wanted.clear()
        if self._cache is None:
            return
        self._num_dropped = self._cache.num_dropped
        for request in [each for each in self._live if each.state.is_terminal]:
            self.leave(request)
        if self._cache.num_bytes > self._max_bytes:
            self._cache.make_room()

    def may_start(self, request: Request, start: int) -> bool:
        """Whether the first image of which a request computes tokens, from `start` on, is encoded;
        if it is not, it is wanted."""
        for media in request.spec.media:
            if media.end > start:
                return self._is_encoded(request, media)
        return True

    def num_ready(self, request: Request, start: int, num_tokens: int, room: int) -> int:
        """How many of a request's tokens from `start` on can be computed with the images that are
        encoded: `num_tokens` if possible. The image that is missing behind them is wanted. The rest
        of an image that is computed whole may be more tokens, up to `room`, or has to wait."""
        assert self._cache is not None, "requests with images were accepted"
        assert self._encoder is not None, "requests with images were accepted"
        stop = start + num_tokens
        for media in request.spec.media:
            if media.end > start and media.start < stop:
                if not self._is_encoded(request, media):
                    return max(0, media.start - start)
                if self._encoder.is_whole and media.end > stop:
                    if media.start > start:
                        return media.start - start
                    return media.end - start if media.end - start <= room else 0
        return num_tokens

    def _is_encoded(self, request: Request, media: Media) -> bool:
        """Whether an image of a request is encoded; if it is not, it is wanted."""
        assert self._cache is not None, "requests with images were accepted"
        image = self._cache.find(request, media)
        if self._cache.is_encoded(image):
            return True
        self._wanted.setdefault(image.number, image)
        if request.times.images_wanted_at is None:
            request.times.images_wanted_at = self._now
        request.times.lacked_image_at = self._now
        return False

    def entry_media(self, request: Request, start: int, stop: int) -> EntryMedia | None:
        """What the images mean for the request's tokens `[start, stop)`."""
        assert self._cache is not None, "requests with images were accepted"
        rows = []
        for media in request.spec.media:
            first, last = max(media.start, start), min(media.end, stop)
            if first < last:
                number = self._cache.find(request, media).number
                rows.append(ImageRows(number, first - start, first - media.start, last - first))
        positions = self._live[request]
        if positions is None:
            return EntryMedia(tuple(rows)) if rows else None
        if start >= positions.stop:
            return EntryMedia(shift=positions.shift)
        return EntryMedia(tuple(rows), 0, positions.between(start, stop))

    def next_to_send(self) -> tuple[int, Media] | None:
        """The number and pixels of an image that the workers do not have and encode next, or after
        that; None if there is none. The caller sends them, and calls `sent`."""
        for image in islice(self._wanted.values(), NUM_SENT):
            if not image.is_begun and image.users:
                image.is_begun = True
                return image.number, next(iter(image.users.values()))
        return None

    def sent(self, number: int) -> None:
        """The workers have all pixels of an image, unless it is forgotten by now."""
        image = None if self._cache is None else self._cache.numbered(number)
        if image is not None:
            image.is_sent = True

    def plan(self, seconds: float) -> tuple[EncoderWork, ...]:
        """The slices that nine of ten iterations compute in so many seconds: at least one, if an
        image is wanted whose pixels were sent."""
        self.slice_seconds = 0.0
        ready = [each for each in self._wanted.values() if each.is_sent]
        if not ready or self._encoder is None or self._cache is None:
            return ()
        begun = [each for each in ready if each.num_planned]
        image = (begun or ready)[0]
        self._cache.make_room(image)
        tiles = self._encoder.num_tiles(image.num_patches)
        is_embedded = image.num_planned >= tiles
        each = self._rates[is_embedded].seconds_per_flop * self._encoder.flops(image.num_patches)
        self.slice_seconds = each * self._errors.margin
        count = int(min(seconds / self._errors.margin, FREE_SECONDS) / each) if each else 1
        if not is_embedded:
            count = min(count, tiles - image.num_planned)
        slices = self._cache.plan(image, max(1, count))
        return (EncoderWork(image.number, slices.start, slices.stop),)

    def take_dropped(self) -> tuple[int, ...]:
        """The images that the step being planned forgets: those dropped before its plan."""
        return () if self._cache is None else self._cache.take_dropped(self._num_dropped)

    # Results

    def committed(self, iteration: Iteration, result: StepResult) -> None:
        """The slices of an iteration were computed."""
        for work in iteration.step.encodes:
            assert self._encoder is not None, "it computed them"
            assert self._cache is not None, "it computed them"
            image = self._cache.numbered(work.image)
            if image is None:
                continue
            self.num_encoded += work.stop == self._encoder.num_slices(image.num_patches)
            flops = (work.stop - work.start) * self._encoder.flops(image.num_patches)
            latest = result.encoder_seconds / flops
            rate = self._rates[work.start >= self._encoder.num_tiles(image.num_patches)]
            if rate.seconds_per_flop:
                self._errors.observe(latest / rate.seconds_per_flop)
            rate.observe(latest)

    def failed(self, numbers: Iterable[int]) -> Iterable[Request]:
        """Images could not be encoded: forgets them, and returns the requests that have them."""
        requests: dict[Request, None] = {}
        for number in numbers:
            image = None if self._cache is None else self._cache.numbered(number)
            if image is not None and self._cache is not None:
                requests |= dict.fromkeys(image.users)
                self._cache.drop(number)
        return requests

    def step_failed(self, iteration: Iteration) -> None:
        """A step raised an error: what it should have forgotten may be left. (The slices that it
        did not compute are made up for.)"""
        if self._cache is not None:
            self._cache.forget_again(iteration.step.dropped)

    def lose(self) -> None:
        """The workers died: no image is encoded, and they have no pixels."""
        self._wanted.clear()
        if self._cache is not None:
            self._cache.lose()
