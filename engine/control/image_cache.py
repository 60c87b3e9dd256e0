"""ImageCache: the images of live requests, and the encodings that the workers keep.

Encodings are kept by digest and salt, least recently used first out, while their bytes fit; those
that a started request still needs stay, beyond the bound if need be. The workers know an image by a
number, which is never used again: what was forgotten or lost counts as a new image.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from engine.media import EncoderReport, Media
from engine.request import Request

Key: TypeAlias = tuple[str, bytes]  # salt and digest


@dataclass(slots=True, eq=False)
class CachedImage:
    """An image that a live request has, or whose encoding is kept."""

    number: int  # for the workers
    num_patches: int
    num_bytes: int  # the size of its encoding
    # Requests that use it and have not ended
    users: dict[Request, Media] = field(default_factory=dict)
    num_planned: int = 0  # slices that iterations have computed or are computing
    is_begun: bool = False  # the workers have some of its pixels
    is_sent: bool = False  # they have all


class ImageCache:
    """All images by key, the last used one last."""

    def __init__(self, encoder: EncoderReport, max_bytes: int) -> None:
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._images: OrderedDict[Key, CachedImage] = OrderedDict()
        self.num_bytes = 0  # the size of all complete encodings
        self._numbers = 0
        self._dropped: list[int] = []  # numbers that no step has forgotten yet

    def __iter__(self) -> Iterator[CachedImage]:
        return iter(self._images.values())

    def is_encoded(self, image: CachedImage) -> bool:
        """Whether its encoding is there when the entries of the iteration being planned run."""
        return image.num_planned == self._encoder.num_slices(image.num_patches)

    def plan(self, image: CachedImage, count: int) -> range:
        """The next slices of an image, at most `count`, which count as planned from now on."""
        start, stop = image.num_planned, self._encoder.num_slices(image.num_patches)
        image.num_planned = min(stop, start + count)
        if image.num_planned == stop:
            self.num_bytes += image.num_bytes
        return range(start, image.num_planned)

    def arrive(self, request: Request) -> None:
        """A request with images was accepted."""
        for media in request.spec.media:
            self.find(request, media).users[request] = media

    def leave(self, request: Request) -> None:
        """A request has ended."""
        for image in self:
            image.users.pop(request, None)

    def find(self, request: Request, media: Media) -> CachedImage:
        """The image of a request, which becomes the last used one."""
        key = (request.spec.salt, media.digest)
        image = self._images.get(key)
        if image is None:
            size = media.num_tokens * self._encoder.row_bytes
            image = CachedImage(self._new_number(), media.num_patches, size)
            self._images[key] = image
        self._images.move_to_end(key)
        return image

    def numbered(self, number: int) -> CachedImage | None:
        """The image that the workers know by a number; None if it is forgotten."""
        return next((image for image in self if image.number == number), None)

    def make_room(self, image: CachedImage | None = None) -> None:
        """Forget the least recently used encodings that no started request needs, until all fit,
        with that of `image`; and images that were begun for requests that have ended."""
        used = self.num_bytes + (0 if image is None else image.num_bytes)
        for key, other in list(self._images.items()):
            if other is image:
                continue
            if not self.is_encoded(other):
                if not other.users:
                    self._renew(key)
            elif used > self._max_bytes and not _is_needed(other):
                used -= other.num_bytes
                self._renew(key)

    def drop(self, number: int) -> None:
        """Forget an image, which could not be encoded."""
        for key, image in list(self._images.items()):
            if image.number == number:
                self._renew(key)

    def lose(self) -> None:
        """The workers died, with all that they had."""
        for key in list(self._images):
            self._renew(key)
        self._dropped.clear()

    def _renew(self, key: Key) -> None:
        """Forget what the workers have of an image, from the step after the one being planned on,
        whose entries may read it. If a request still has it, it counts as a new one."""
        image = self._images.pop(key)
        if self.is_encoded(image):
            self.num_bytes -= image.num_bytes
        if image.is_begun:
            self._dropped.append(image.number)
        if image.users:
            number = self._new_number()
            again = CachedImage(number, image.num_patches, image.num_bytes, image.users)
            self._images[key] = again

    def _new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def forget_again(self, numbers: tuple[int, ...]) -> None:
        """Let the next step forget images that another one may not have forgotten."""
        self._dropped.extend(numbers)

    @property
    def num_dropped(self) -> int:
        """Images that no step has forgotten yet."""
        return len(self._dropped)

    def take_dropped(self, count: int) -> tuple[int, ...]:
        """The images that a step forgets: the first `count`, which were dropped before its plan."""
        dropped = tuple(self._dropped[:count])
        del self._dropped[:count]
        return dropped


def _is_needed(image: CachedImage) -> bool:
    """Whether a request that has started has still to compute some of its tokens."""
    return any(
        request.is_started and media.end > request.num_planned
        for request, last in image.users.items()
        for media in request.spec.media
        if media.digest == last.digest
    )
