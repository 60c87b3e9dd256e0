"""Names for KV content: the chained hash of all tokens up to the end of each full block.

A block's KV depends on every token before it, so equal chained hash means equal KV, whoever
computed it: a prompt, or an answer that comes back as part of the next turn's prompt.
"""

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.request import Request

DIGEST_BYTES = 16  # collisions would show one caller's content to another


def extend_hashes(request: "Request", block_size: int) -> None:
    """Name all full blocks of the tokens that the request knows by now.

    The chain starts from the caller's salt: requests with different salts share nothing. It is
    hashed first, so that nobody's salt can stand for the blocks before another caller's block.
    """
    hashes = request.block_hashes
    for index in range(len(hashes), request.num_tokens // block_size):
        before = hashes[-1] if hashes else _root(request.spec.salt)
        tokens = request.tokens(index * block_size, (index + 1) * block_size)
        digest = blake2b(before, digest_size=DIGEST_BYTES)
        digest.update(array("i", tokens))
        hashes.append(digest.digest())


def _root(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, person=b"salt").digest()
