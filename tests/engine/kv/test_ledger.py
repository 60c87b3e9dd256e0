from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.step import RequestId

A, B = RequestId(1), RequestId(2)


def published(ledger: KVLedger, *hashes: bytes) -> list[bool]:
    return [block_hash in ledger.prefixes for block_hash in hashes]


def test_a_reservation_is_rounded_up_to_blocks() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=16))
    assert ledger.reserve(A, 17)
    assert ledger.num_held == 2
    assert ledger.num_free == 2


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=16))
    assert ledger.reserve(A, 48)
    assert not ledger.reserve(B, 17)
    assert repr(ledger) == (
        "KVLedger(free=1, held=3, cached=0, moving=0, all=4, holders=1, "
        "HostTier(free=0, held=0, cached=0, moving=0, all=0))"
    )


def test_growing_keeps_the_blocks_that_are_held() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=2))
    ledger.reserve(A, 2)
    before = ledger.table(A)
    ledger.reserve(A, 5)
    assert ledger.table(A).startswith(before)
    assert len(array("i", ledger.table(A))) == 3


def test_reserving_fewer_slots_than_are_held_frees_none() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=2))
    ledger.reserve(A, 8)
    assert ledger.reserve(A, 1)
    assert ledger.num_held == 4


def test_blocks_of_ended_requests_count_as_leaked() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=2))
    ledger.reserve(A, 4)
    ledger.reserve(B, 2)
    assert ledger.num_leaked(live={B}) == 2


def test_check_finds_a_block_owned_twice() -> None:
    ledger = KVLedger(KVShape(num_blocks=2, block_size=1))
    ledger.reserve(A, 1)
    ledger.pool._free[0] = 0
    with pytest.raises(AssertionError, match="owned twice"):
        ledger.check()


def test_a_published_prefix_is_shared_and_outlives_its_first_holder() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=2))
    ledger.reserve(A, 5)
    ledger.publish(A, [b"one", b"two"])
    assert published(ledger, b"one", b"two", b"three") == [True, True, False]
    ledger.adopt(B, [b"one", b"two"])
    assert ledger.table(B) == ledger.table(A)[:8]
    assert ledger.num_held == 3
    ledger.release(A)
    assert (ledger.num_held, ledger.num_cached) == (2, 0)
    ledger.release(B)
    assert (ledger.num_held, ledger.num_cached, ledger.num_free) == (0, 2, 4)
    ledger.check()


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=1))
    ledger.reserve(A, 2)
    ledger.publish(A, [b"one", b"two"])
    ledger.reserve(B, 2)
    ledger.publish(B, [b"uno", b"due"])
    ledger.release(A)
    ledger.release(B)
    ledger.reserve(A, 3)
    assert published(ledger, b"one", b"two", b"uno", b"due") == [False, False, True, False]
    ledger.check()


def test_content_computed_by_two_requests_is_published_once() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=1))
    for owner in (A, B):
        ledger.reserve(owner, 1)
        ledger.publish(owner, [b"same"])
    ledger.release(A)
    ledger.release(B)
    assert (ledger.num_cached, ledger.num_free) == (1, 4)
    ledger.check()


def test_after_the_device_is_lost_nothing_is_held_or_cached() -> None:
    ledger = KVLedger(KVShape(num_blocks=4, block_size=1))
    ledger.reserve(A, 2)
    ledger.publish(A, [b"one"])
    ledger.reset()
    assert (ledger.num_free, ledger.num_cached) == (4, 0)
    assert published(ledger, b"one") == [False]
    ledger.check()


class LedgerMachine(RuleBasedStateMachine):
    """Random reservations and releases against a model that only counts."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = KVLedger(KVShape(num_blocks=13, block_size=3))
        self.slots: dict[RequestId, int] = {}

    @rule(owner=st.integers(0, 4).map(RequestId), slots=st.integers(0, 45))
    def reserve(self, owner: RequestId, slots: int) -> None:
        wanted = max(-(-slots // 3), -(-self.slots.get(owner, 0) // 3))
        others = sum(-(-n // 3) for other, n in self.slots.items() if other != owner)
        granted = self.ledger.reserve(owner, slots)
        assert granted == (wanted + others <= 13)
        if granted:
            self.slots[owner] = max(slots, self.slots.get(owner, 0))

    @rule(owner=st.integers(0, 4).map(RequestId))
    def release(self, owner: RequestId) -> None:
        assert self.ledger.release(owner) == -(-self.slots.pop(owner, 0) // 3)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.ledger.check()
        assert self.ledger.num_held == sum(-(-n // 3) for n in self.slots.values())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
