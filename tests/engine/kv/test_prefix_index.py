from random import Random

import pytest

from engine.kv import prefix
from engine.kv.prefix import PrefixIndex


class CountingHashes(list[bytes]):
    """Hashes of a request that count how often one is read."""

    num_reads = 0

    def __getitem__(self, index: object) -> bytes:  # type: ignore[override]
        self.num_reads += 1
        return super().__getitem__(index)  # type: ignore[call-overload,no-any-return]


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{depth}".encode() for depth in range(length)]


def test_a_match_is_remembered_until_one_of_its_blocks_is_evicted() -> None:
    index = PrefixIndex()
    own, other = CountingHashes(chain("own", 1000)), chain("other", 1000)
    for depth in range(1000):
        index.publish(depth, own[depth], depth)
        index.publish(1000 + depth, other[depth], depth)
    seen = index.num_evictions
    index.evict(1700)
    own.num_reads = 0
    assert index.num_matched(own, 1000, seen) == 1000
    index.evict(600)
    index.evict(800)
    assert index.num_matched(own, 1000, seen) == 600
    assert own.num_reads <= 8


def test_a_block_that_is_published_again_is_matched() -> None:
    index = PrefixIndex()
    (name,) = chain("a", 1)
    index.publish(7, name, 0)
    index.evict(7)
    index.publish(8, name, 0)
    assert index.num_matched([name], 1, 0) == 1


@pytest.mark.parametrize("most", [2, 4096])
def test_the_remembered_match_agrees_with_a_whole_search(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "MAX_EVICTIONS", most)
    random, index = Random(5), PrefixIndex()
    chains = [chain(name, 12) for name in "abc"]
    matches = [(0, 0)] * len(chains)  # (blocks matched, evictions seen)
    free = list(range(40))
    held: dict[int, bytes] = {}
    for _ in range(3000):
        hashes = random.choice(chains)
        depth = random.randrange(12)
        if random.random() < 0.01:
            index.clear()
            free += held
            held.clear()
        elif hashes[depth] not in index:
            block = free.pop()
            index.publish(block, hashes[depth], depth)
            held[block] = hashes[depth]
        elif random.random() < 0.3:
            block = random.choice(list(held))
            index.evict(block)
            free.append(block)
            del held[block]
        index.check()
        number = random.randrange(3)
        matched = index.num_matched(chains[number], *matches[number])
        while matched < 12 and chains[number][matched] in index:
            matched += 1
        matches[number] = (matched, index.num_evictions)
        published = [name in index for name in chains[number]]
        assert matched == (published.index(False) if False in published else 12)
