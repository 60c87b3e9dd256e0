"""Digests of KV content, and which page of the device has which content.

The digest of a full block is chained: of all that comes before the block's end. Its KV depends on
everything before it, so equal digest means equal KV, whether it was computed for a prompt or for an
output that is part of the next prompt of the chat. A digest takes about 2 us, so a request's
digests are computed only as far as they are needed.

    salt, adapter ──▶ root ──▶ block 0 ──▶ block 1 ──▶ …
                       tokens and spans ┴───────────┘

A digest is of a sequence of *parts*. Each begins with its kind and its length, so that different
sequences of parts are different bytes: no salt can imitate a block, and no tokens an image.
`HASH_VERSION` is a part of the name of everything that keeps contents by digest outside the
process; it changes when the same content gets another digest.

A waiting request remembers how many of its leading pages are published. Publishing only makes
that number larger, which a look at the next hash finds. Evictions make it smaller, so they are
kept in a log: a request reads the evictions since it last looked, not its whole chain of hashes.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.media import Span
from engine.request import Request
from engine.step import HASH_BYTES, Tier

LENGTH_BYTES = 4  # fixed: the format of a digest's content
NAMES_PER_PLAN = 512  # fixed: about 1 ms of the event loop for each thing that is done with them


class Part(IntEnum):
    """What a part of a digest's content is."""

    SALT = 1  # the caller's: requests with different salts share no block
    ADAPTER = 2  # the digest of the LoRA adapter, so that only it can have computed the blocks
    PARENT = 3  # the digest of the block before, or the root
    TOKENS = 4
    SPAN = 5  # content behind tokens that only stand for it: its place and its digest

    def of(self, content: bytes) -> bytes:
        """A part of this kind."""
        return self.header(len(content)) + content

    def header(self, num_bytes: int) -> bytes:
        """The beginning of a part with so many bytes of content."""
        return self.to_bytes(1, "little") + num_bytes.to_bytes(LENGTH_BYTES, "little")


_PARENT = Part.PARENT.header(HASH_BYTES)


def extend_hashes(request: Request, block_size: int, num_blocks: int) -> None:
    """Extend `request.block_hashes` to its first `num_blocks` blocks, which are full."""
    hashes, spec = request.block_hashes, request.spec
    for index in range(len(hashes), num_blocks):
        before = hashes[-1] if hashes else _root(spec.salt, spec.lora_digest)
        start = index * block_size
        tokens = request.tokens(start, start + block_size)
        hashes.append(_next(before, tokens, start, spec.spans))


def hash_blocks(
    salt: str,
    tokens: Sequence[int],
    block_size: int,
    lora_digest: str = "",
    spans: Sequence[Span] = (),
) -> list[bytes]:
    """The digests of all full blocks of these tokens, of which `spans` stand for other content."""
    hashes, before = [], _root(salt, lora_digest)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        before = _next(before, tokens[start : start + block_size], start, spans)
        hashes.append(before)
    return hashes


def name_in_group(block_hash: bytes, group: int) -> bytes:
    """The digest under which a group's block is published; the first group has the plain one."""
    return block_hash if not group else bytes((block_hash[0] ^ group,)) + block_hash[1:]


def spans_in(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """The spans with a token at one of the positions `[start, stop)`."""
    return [span for span in spans if span.start < stop and start < span.start + span.length]


def _next(before: bytes, tokens: Sequence[int], start: int, spans: Sequence[Span] = ()) -> bytes:
    """The digest of the block with these tokens, the first of which is at position `start`."""
    ids = array("i", tokens)
    digest = blake2b(_PARENT + before + Part.TOKENS.of(ids.tobytes()), digest_size=HASH_BYTES)
    if spans:
        for span in spans_in(spans, start, start + len(ids)):
            place = array("i", (span.start - start, span.length)).tobytes()
            digest.update(Part.SPAN.of(place + span.digest))
    return digest.digest()


def _root(salt: str, lora_digest: str) -> bytes:
    content = Part.SALT.of(salt.encode()) + Part.ADAPTER.of(bytes.fromhex(lora_digest))
    return blake2b(content, digest_size=HASH_BYTES).digest()


# fixed: a limit of memory, of a log; a request that missed some looks up all its hashes again
MAX_EVICTIONS = 4096


Key = TypeVar("Key", int, bytes)


class PrefixListener(Protocol):
    """Called synchronously when the set of cached prefixes changes. Must not wait or raise."""

    def stored(self, request: Request, places: Sequence[int], group: int) -> None:
        """These pages of the request, by their place in it, can be reused from now on in a layer
        group. Snapshots of recurrent layers are reported as the group behind the last one."""

    def removed(self, block_hash: bytes) -> None:
        """The page with this name in its group (`name_in_group`) cannot be reused any more."""

    def cleared(self) -> None:
        """No page of the device or of the host tier can be reused any more."""

    def copied(self, tier: Tier, block_hash: bytes, is_saved: bool) -> None:
        """A tier below the device has a copy of the page from now on, or no longer."""


class _Published(NamedTuple):
    name: bytes
    depth: int | None  # number of pages before it in its chain; None if it is in no chain


class PrefixIndex:
    """Maps hashes to published pages and back."""

    def __init__(self) -> None:
        self._pages: dict[bytes, int] = {}
        self._published: dict[int, _Published] = {}
        self._evictions: list[_Published] = []
        self._num_dropped = 0  # evictions before those in the log
        self.version = 0  # changes whenever the published pages change
        self.listener: PrefixListener | None = None

    def __contains__(self, name: object) -> bool:
        return name in self._pages

    @property
    def pages(self) -> set[int]:
        """All published pages."""
        return set(self._published)

    @property
    def num_evictions(self) -> int:
        """Evictions so far; for `num_matched`."""
        return self._num_dropped + len(self._evictions)

    def is_published(self, page: int) -> bool:
        return page in self._published

    def name_of(self, page: int) -> bytes:
        """The hash under which a page is published."""
        return self._published[page].name

    def page_of(self, name: bytes) -> int:
        """The page that is published under this hash."""
        return self._pages[name]

    def find(self, name: bytes) -> int | None:
        """The page that is published under this hash; None if there is none."""
        return self._pages.get(name)

    def publish(self, page: int, name: bytes, depth: int | None) -> None:
        """Publish a page under a hash that is not published, the `depth`th of its chain. Pages
        in no chain are not logged when they are evicted."""
        self.version += 1
        self._pages[name] = page
        self._published[page] = _Published(name, depth)

    def evict(self, page: int) -> None:
        """The content of a published page is overwritten from now on."""
        self.version += 1
        evicted = self._published.pop(page)
        del self._pages[evicted.name]
        if self.listener is not None:
            self.listener.removed(evicted.name)
        if evicted.depth is None:
            return
        self._evictions.append(evicted)
        if len(self._evictions) > 2 * MAX_EVICTIONS:
            del self._evictions[:MAX_EVICTIONS]
            self._num_dropped += MAX_EVICTIONS

    def clear(self) -> None:
        """The content of all pages is lost."""
        self.version += 1
        self._pages.clear()
        self._published.clear()
        self._num_dropped += len(self._evictions) + 1
        self._evictions.clear()
        if self.listener is not None:
            self.listener.cleared()

    def num_matched(self, hashes: Sequence[bytes], num_matched: int, seen: int) -> int:
        """How many of the first `num_matched` hashes, all published when there had been `seen`
        evictions, are published without a gap now."""
        if seen < self._num_dropped:
            num_matched, seen = self._first_gap(hashes, num_matched), self.num_evictions
        for name, depth in self._evictions[seen - self._num_dropped :]:
            assert depth is not None, "only pages of chains are logged"
            is_own = depth < num_matched and hashes[depth] == name
            if is_own and name not in self._pages:
                num_matched = depth
        return num_matched

    def _first_gap(self, hashes: Sequence[bytes], num_matched: int) -> int:
        for depth in range(num_matched):
            if hashes[depth] not in self._pages:
                return depth
        return num_matched

    def check(self) -> None:
        """Assert that both directions agree."""
        backwards = {item.name: page for page, item in self._published.items()}
        assert backwards == self._pages, "hashes drifted"


class EvictionOrder(Generic[Key]):
    """Keys in the order in which they are evicted: the least recently used first, retained ones
    behind the others."""

    def __init__(self) -> None:
        self._others: OrderedDict[Key, None] = OrderedDict()
        self._retained: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._others) + len(self._retained)

    def __contains__(self, key: object) -> bool:
        return key in self._others or key in self._retained

    def __iter__(self) -> Iterator[Key]:
        yield from self._others
        yield from self._retained

    def add(self, key: Key, *, is_retained: bool) -> None:
        """A key that is not there, as the most recently used one."""
        (self._retained if is_retained else self._others)[key] = None

    def remove(self, key: Key) -> bool:
        """Returns whether the key was there."""
        there = key in self
        self._others.pop(key, None)
        self._retained.pop(key, None)
        return there

    def sort(self, key: Key, *, is_retained: bool) -> None:
        """A key, whether it is there or not, as one that is retained from now on, or as the first
        one of the others."""
        if is_retained:
            self.remove(key)
            self.add(key, is_retained=True)
        else:
            self.put_first(key)

    def put_first(self, key: Key) -> None:
        """Evict a key before all others, whether it is there or not."""
        self.remove(key)
        self._others[key] = None
        self._others.move_to_end(key, last=False)

    def clear(self) -> None:
        self._others.clear()
        self._retained.clear()
