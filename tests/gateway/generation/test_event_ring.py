import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import EventsEvicted
from gateway.schema.rendering import EventNumbers, split_events
from gateway.store.event_ring import OVERHEAD_BYTES, EventRing, EventRings, RingLimits

KEYS = ("a", "b", "c")
LIMITS = RingLimits(key_bytes=3 * OVERHEAD_BYTES, total_bytes=6 * OVERHEAD_BYTES)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "event", "event", "event", "comment", "complete", "close"]),
        st.integers(0, 11),
        st.integers(0, 2000),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_rings_keep_to_their_limits_and_hold_the_newest_bytes(
    operations: list[tuple[str, int, int]],
) -> None:
    rings = EventRings(LIMITS)
    opened: list[EventRing] = []
    written: dict[EventRing, list[tuple[int | None, bytes]]] = {}
    closed: set[EventRing] = set()
    for kind, number, size in operations:
        if kind == "open" or not opened:
            opened.append(rings.open(KEYS[number % len(KEYS)]))
            written[opened[-1]] = []
            continue
        ring = opened[number % len(opened)]
        if kind == "complete":
            ring.complete()
        elif kind == "close":
            rings.close(ring)
            closed.add(ring)
        elif not ring.is_complete:
            if kind == "event":
                written[ring].append((ring.num_events, b"e" * size + b"\n\n"))
                ring.append(written[ring][-1][1])
            else:
                written[ring].append((None, b":" * size + b"\n\n"))
                ring.append_comment(written[ring][-1][1])
        closed |= {each for each in opened if each.is_evicted}
        held = [each for each in opened if each not in closed]
        assert rings.num_bytes == sum(each.num_bytes for each in held)
        for key in KEYS:
            own = [each for each in held if each.tenant == key]
            fixed = OVERHEAD_BYTES * len(own)
            assert sum(each.num_bytes for each in own) <= max(LIMITS.key_bytes, fixed)
        assert rings.num_bytes <= max(LIMITS.total_bytes, OVERHEAD_BYTES * len(held))
        for each in opened:
            check_held(each, written[each])


def check_held(ring: EventRing, written: list[tuple[int | None, bytes]]) -> None:
    """What is held is the end of what was written, from the start of an event on. If a comment
    before the first event was evicted, a reader of the whole stream is told so."""
    whole = b"".join(data for _, data in written)
    assert ring.end == len(whole)
    if (held := ring.whole()) is not None:
        assert held == whole
        return
    with pytest.raises(EventsEvicted):
        ring.read(0)
    numbers = [number for number, _ in written if number is not None]
    if 0 < ring.oldest < len(numbers):
        offset = asyncio.run(ring.offset_after(ring.oldest - 1))
        assert whole.startswith(b"e", offset) or whole.startswith(b"\n", offset)
        assert ring.read(offset) == whole[offset : offset + (64 << 10)]


@given(st.lists(st.integers(0, 3), max_size=20))
def test_events_are_numbered_in_order_however_they_are_grouped(groups: list[int]) -> None:
    numbers, stream = EventNumbers(), b""
    for count in groups:
        stream += numbers.numbered(b"data: x\n\n" * count) if count else b""
    events = split_events(stream)
    assert events == [b"id: %d\ndata: x\n\n" % number for number in range(sum(groups))]


def test_a_reader_waits_for_a_number_that_is_not_there_yet() -> None:
    async def scene() -> None:
        ring = EventRings(RingLimits()).open("")
        waiting = asyncio.create_task(ring.offset_after(1))
        for _ in range(3):
            await asyncio.sleep(0)
            ring.append(b"data: x\n\n")
        assert await waiting == 18
        later = asyncio.create_task(ring.offset_after(9))
        await asyncio.sleep(0)
        ring.complete()
        assert await later == ring.end

    asyncio.run(scene())
