"""Block hashes: equal only for equal tokens after equal tokens under an equal salt."""

from itertools import count

from engine.kv.prefix import extend_hashes, hash_blocks
from engine.request import Request, RequestSpec
from engine.step import RequestId
from tests.scheduling import GREEDY

BLOCK = 2


def names(prompt: tuple[int, ...], salt: str = "") -> list[bytes]:
    """The hashes of the prompt's full blocks."""
    request = Request(RequestId(0), RequestSpec(prompt, 1, GREEDY, salt=salt), arrived_at=0.0)
    extend_hashes(request, BLOCK, len(prompt) // BLOCK)
    assert request.block_hashes == hash_blocks(salt, prompt, BLOCK)
    return request.block_hashes


def test_only_full_blocks_are_hashed_and_each_hash_depends_on_all_blocks_before() -> None:
    assert len(names((1, 2, 3))) == 1
    assert names((1, 2, 3, 4))[:1] == names((1, 2, 3))
    assert names((9, 2, 3, 4))[1] != names((1, 2, 3, 4))[1]


def test_hashes_with_different_salts_differ() -> None:
    by_salt = [names((1, 2, 3, 4), salt) for salt in ("", "a", "b")]
    assert len({name for each in by_salt for name in each}) == 6


def test_no_salt_can_imitate_the_hash_of_another_callers_block() -> None:
    """Otherwise its owner could publish KV of position 0 under the hash of a later block."""
    for token in count():
        first, second = names((token, 0, 7, 7))
        try:
            salt = first.decode()
        except UnicodeDecodeError:
            continue
        assert names((7, 7), salt) != [second]
        return
