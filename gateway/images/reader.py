"""ImageReader: the images of a request, from where they are to what the model's encoder reads.

Images are decoded in another process (`ImageDecoder`), one of a request at a time and one of each
client. What was decoded is kept within a bound of memory, since every turn of a conversation has
all its images again; requests of another prefix domain do not find it.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.errors import InvalidRequest, Unavailable
from gateway.access.callers import Caller
from gateway.access.seats import Seats
from gateway.errors import FileNotFound, PromptTooLong
from gateway.ports import EncodedImage, ImageDecoder, PreparedImage, UnreadableImage
from gateway.schema.decoding import quote
from gateway.schema.images import NO_FILES, RequestedImage
from gateway.store.files import Files

TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
# Sent by clients that know no better
_ALSO = ("image/jpg", "image/apng", "application/octet-stream")
MAX_HEADER = 256  # characters of a data URL before the comma
SEATS = 2
FULL = "Too many images are being decoded. Please try again later."
WAIT_SECONDS = 30.0  # for a seat
LOW_TOKENS = 256  # tokens of an image whose `detail` is "low"
HASHED_CHARS = 1 << 20  # characters that become bytes at once, since this holds the interpreter
NO_HOSTS = (
    "has a URL that this server does not fetch, since --media-hosts does not name its host; send "
    "the image itself as a data URL (data:image/png;base64,…) or upload it to /v1/files"
)


class Fetcher(Protocol):
    """Fetches images of HTTPS URLs."""

    async def fetch(self, url: str) -> bytes:
        """The bytes of the image. Raises `UnreadableImage`."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Bounds on the images of one request, and on the memory for decoded images."""

    max_images: int = 64
    max_tokens: int = 4096  # tokens of one image
    max_bytes: int = 32 << 20  # the size of one file
    max_pixel_bytes: int = 128 << 20  # for one request
    kept_bytes: int = 64 << 20


class Sender(NamedTuple):
    """Who sends images, and the files that may be among them. `now` is in Unix seconds."""

    caller: Caller
    files: Files
    now: int


class ImageReader:
    """Reads the images of requests for one model."""

    def __init__(
        self,
        decoder: ImageDecoder,
        limits: ImageLimits | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        self.decoder = decoder
        self._limits = limits or ImageLimits()
        self._fetcher = fetcher
        self._seats = Seats(SEATS, WAIT_SECONDS, FULL)
        self._kept: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._kept_bytes = 0

    async def read(
        self, images: Sequence[RequestedImage], sender: Sender, most: int | None = None
    ) -> list[PreparedImage]:
        """The images in order.

        Raises `InvalidRequest` that names the field of the first image that cannot be read, or that
        is one too many, `PromptTooLong` if they have more than `most` tokens, `Unavailable` and
        `Overloaded`.
        """
        limits = self._limits
        if len(images) > limits.max_images:
            raise InvalidRequest(
                f"A request may have at most {limits.max_images} images, but got {len(images)}.",
                images[limits.max_images].field,
            )
        prepared: list[PreparedImage] = []
        num_tokens = num_bytes = 0
        for image in images:
            prepared.append(await self._read(image, sender))
            num_tokens += prepared[-1].num_tokens
            num_bytes += prepared[-1].num_bytes
            if most is not None and num_tokens > most:
                raise PromptTooLong(num_tokens, most, image.field)
            if num_bytes > limits.max_pixel_bytes:
                raise InvalidRequest(
                    f"The images up to '{image.field}' need more than "
                    f"{limits.max_pixel_bytes >> 20} MiB; send fewer or smaller ones, or with "
                    "'detail': 'low'.",
                    image.field,
                )
        return prepared

    async def _read(self, image: RequestedImage, sender: Sender) -> PreparedImage:
        field = image.field
        max_tokens = self._limits.max_tokens
        if image.detail == "low":
            max_tokens = min(LOW_TOKENS, max_tokens)
        try:
            encoded = await self._encoded(image, sender)
            if encoded.num_bytes > self._limits.max_bytes:
                raise UnreadableImage(f"has more than {self._limits.max_bytes >> 20} MiB")
            work = self._prepare(encoded, max_tokens, sender.caller)
            task = asyncio.get_running_loop().create_task(work, name="image")
            task.add_done_callback(_retrieve)
            return await asyncio.shield(task)  # so that its seat is taken until it has ended
        except UnreadableImage as error:
            raise InvalidRequest(f"The image in '{field}' {error}.", field) from None
        except FileNotFound as error:
            raise FileNotFound(image.file_id or "", field) from error
        except Unavailable as error:
            raise Unavailable(f"The image in '{field}' cannot be read now: {error}") from error

    async def _encoded(self, image: RequestedImage, sender: Sender) -> EncodedImage:
        """The bytes of an image. Raises `UnreadableImage` and `FileNotFound`."""
        if image.file_id is not None:
            return EncodedImage(await self._stored(image.file_id, sender))
        url = image.url or ""
        if url[:5].lower() == "data:":
            return image_of_data_url(url)
        if self._fetcher is None or "://" not in url[:10]:
            raise UnreadableImage(NO_HOSTS if "://" in url[:10] else "is not a data URL")
        return EncodedImage(await self._fetcher.fetch(url))

    async def _stored(self, file_id: str, sender: Sender) -> bytes:
        record = await sender.files.find(file_id, sender.caller.tenant, sender.now)
        if record.num_bytes > self._limits.max_bytes:
            raise UnreadableImage(f"has more than {self._limits.max_bytes >> 20} MiB")
        pieces: list[bytes] = []
        while (piece := await sender.files.piece(file_id, len(pieces))) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    async def _prepare(self, image: EncodedImage, max_tokens: int, caller: Caller) -> PreparedImage:
        """The image, decoded in one of the seats unless it is kept."""
        key = await asyncio.to_thread(_digest, image.data, f"{max_tokens} {caller.salt('')}")
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        async with self._seats.taken(caller.client):
            prepared = await self.decoder.prepare(image, max_tokens)
        self._keep(key, prepared)
        return prepared

    def _keep(self, key: bytes, image: PreparedImage) -> None:
        if key in self._kept or image.num_bytes > self._limits.kept_bytes:
            return
        self._kept[key] = image
        self._kept_bytes += image.num_bytes
        while self._kept_bytes > self._limits.kept_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes


def _digest(data: bytes | str, domain: str) -> bytes:
    """The key of an image in a prefix domain."""
    digest = hashlib.sha256(f"{len(domain)} {domain} {type(data).__name__} ".encode())
    for start in range(0, len(data), HASHED_CHARS):
        piece = data[start : start + HASHED_CHARS]
        digest.update(piece if isinstance(piece, bytes) else piece.encode(errors="surrogatepass"))
    return digest.digest()


def _retrieve(task: asyncio.Task[PreparedImage]) -> None:
    """See the error of a task that may have no reader any more, so that it is not logged."""
    if not task.cancelled():
        task.exception()


def image_of_data_url(url: str) -> EncodedImage:
    """The base64 text of a data URL, which is not decoded here. Raises `UnreadableImage`."""
    comma = url.find(",", 0, MAX_HEADER)
    if comma < 0:
        raise UnreadableImage("is not a data URL such as data:image/png;base64,…")
    media_type, *parameters = [part.strip().lower() for part in url[5:comma].split(";")]
    if media_type == "application/pdf":
        raise UnreadableImage(f"is a PDF. {NO_FILES.removesuffix('.')}")
    if media_type not in TYPES + _ALSO:
        raise UnreadableImage(f"is of the type {quote(media_type)}; allowed are {', '.join(TYPES)}")
    if "base64" not in parameters:
        raise UnreadableImage("is a data URL that is not base64")
    return EncodedImage(url[comma + 1 :], is_base64=True)
