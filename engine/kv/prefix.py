"""Digests of KV content: the chained digest of all that comes before the end of each full block.

A block's KV depends on everything before it, so equal chained digest means equal KV, whether it was
computed for a prompt or for an output that is part of the next prompt of the chat. A digest takes
about 2 us, so a request's digests are computed only as far as they are needed.

    salt, adapter ──▶ root ──▶ block 0 ──▶ block 1 ──▶ …
                       tokens and spans ┴───────────┘

A digest is of a sequence of *parts*. Each begins with its kind and its length, so that different
sequences of parts are different bytes: no salt can imitate a block, and no tokens an image.
`HASH_VERSION` is a part of the name of everything that keeps contents by digest outside the
process; it changes when the same content gets another digest.
"""

from array import array
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

from engine.step import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.media import Span
    from engine.request import Request

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


def extend_hashes(request: "Request", block_size: int, num_blocks: int) -> None:
    """Extend `request.block_hashes` to its first `num_blocks` blocks, which are full."""
    hashes, spec = request.block_hashes, request.spec
    for index in range(len(hashes), num_blocks):
        before = hashes[-1] if hashes else _root(spec.salt, spec.lora_digest)
        start = index * block_size
        tokens = request.tokens(start, start + block_size)
        hashes.append(_next(before, tokens, start, spec.spans))


def hash_blocks(
    salt: str,
    tokens: "Sequence[int]",
    block_size: int,
    lora_digest: str = "",
    spans: "Sequence[Span]" = (),
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


def spans_in(spans: "Sequence[Span]", start: int, stop: int) -> "list[Span]":
    """The spans with a token at one of the positions `[start, stop)`."""
    return [span for span in spans if span.start < stop and start < span.start + span.length]


def _next(
    before: bytes, tokens: "Sequence[int]", start: int, spans: "Sequence[Span]" = ()
) -> bytes:
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
