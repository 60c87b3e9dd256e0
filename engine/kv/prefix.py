"""Hashes of KV content: the chained hash of all tokens up to the end of each full block.

A block's KV depends on every token before it, so equal chained hash means equal KV, whether it was
computed for a prompt or for an output that is part of the next prompt of the chat. A hash takes
about 2 us, so a request's hashes are computed only as far as they are needed.
"""

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

from engine.step import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.request import Request

DIGEST_BYTES = HASH_BYTES  # a collision would let one caller read another caller's KV


def extend_hashes(request: "Request", block_size: int, num_blocks: int) -> None:
    """Extend `request.block_hashes` to its first `num_blocks` blocks, which are full.

    The chain starts from the hash of the caller's salt, so requests with different salts share no
    block. The salt is hashed with its own personalization: no salt can be chosen that equals the
    hash of another caller's block. The digest of a LoRA adapter is the key of this hash, so
    requests share blocks only if the same adapter, by its bytes, computed them.
    """
    hashes = request.block_hashes
    for index in range(len(hashes), num_blocks):
        before = hashes[-1] if hashes else _root(request.spec.salt, request.spec.lora_digest)
        tokens = request.tokens(index * block_size, (index + 1) * block_size)
        hashes.append(_next(before, tokens))


def hash_blocks(
    salt: str, tokens: "Sequence[int]", block_size: int, lora_digest: str = ""
) -> list[bytes]:
    """The hashes of all full blocks of these tokens."""
    hashes, before = [], _root(salt, lora_digest)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        before = _next(before, tokens[start : start + block_size])
        hashes.append(before)
    return hashes


def name_in_group(block_hash: bytes, group: int) -> bytes:
    """The hash under which a group's block is published; the first group has the plain hash."""
    return block_hash if not group else bytes((block_hash[0] ^ group,)) + block_hash[1:]


def _next(before: bytes, tokens: "Sequence[int]") -> bytes:
    digest = blake2b(before, digest_size=DIGEST_BYTES)
    digest.update(array("i", tokens))
    return digest.digest()


def _root(salt: str, lora_digest: str) -> bytes:
    key = bytes.fromhex(lora_digest)
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=key, person=b"salt").digest()
