"""RequestStates: which request holds which recurrent states, and which snapshots are cached.

A recurrent layer keeps one state of fixed size per request, whatever the number of tokens. A state
slot has the states of all recurrent layers of all stages. Each started request owns one slot, which
its steps read and write. A *snapshot* is a slot with the state after a prefix: a step writes it
beside the request's own slot, and when the step has returned it is published under the hash of that
prefix. A request that starts behind the prefix reads the snapshot in its first step. Snapshots are
saved in the tiers below like cached blocks. Those within an output are *passing*, and so are those
between the intervals of a very long prompt: the next one replaces them, so that they are saved only
when their request has ended. Once the next message of a chat has a snapshot, the last ones of the
output and of the prompt before it are evicted before others: only another answer or another next
message would read them. A snapshot is loaded into the own slot of its request. A model without
recurrent layers has no slots, and then nothing here happens.

A step with drafts writes the state after each of its rows to a slot of its own, and the state after
the last row to the request's slot. If it accepts only some drafts, the request's next step reads
the slot of the last accepted row.

    free ──start──▶ owned by a request ──release──▶ free
    free ──plan──▶ being written ──commit──▶ snapshot, cached ──evict──▶ free
                                              │    ▲
                                            start  commit of the first step
                                              ▼    │
                                        snapshot, being read

    free ──plan drafts──▶ being written ──commit──▶ free, or read by the request's next step
"""

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import NamedTuple

from engine.kv.pages import Pages
from engine.kv.prefix import name_in_group
from engine.request import Request
from engine.step import NO_STATE, RequestId, Snapshot, StateSlots

MIN_STATES = 2  # fixed: the snapshot that a request starts behind, and its own
# Between two snapshots of a long prompt, passing ones included; swept in results/constants
SNAPSHOT_TOKENS = 1024


class _Written(NamedTuple):
    """A slot that a step in flight writes: the state after so many tokens."""

    num_tokens: int
    slot: int


@dataclass(slots=True)
class _Held:
    """The slots of one request."""

    slot: int
    source: int = NO_STATE  # what its next step reads: zeros, a snapshot, or its own slot
    # What it reads once, until that step has returned: the snapshot that it started behind, or the
    # slot of its last accepted row.
    read_once: int | None = None
    written: list[_Written] = field(default_factory=list)
    drafted: range | None = None  # the positions of the step with drafts that is in flight
    between: set[int] = field(default_factory=set)  # ends of passing snapshots of its prompt
    passing: bytes | None = None  # the name of its newest snapshot, if the next one replaces it
    last: bytes | None = None  # the name of its newest snapshot that is not passing
    began_behind: bytes | None = None  # the name of a snapshot in `RequestStates._ended`

    def slots(self) -> list[int]:
        held = [self.slot, *[one.slot for one in self.written]]
        return held if self.read_once is None else [*held, self.read_once]


class RowsOfDrafts(NamedTuple):
    """The rows of a decode at `start` with so many drafts; with `has_snapshot` the last row ends a
    block."""

    start: int
    num_drafts: int
    has_snapshot: bool


class RequestStates:
    """Gives requests their state slots, which are pages on the device, and publishes snapshots."""

    def __init__(self, pages: Pages, group: int) -> None:
        """`group` is the number of layer groups: in names, the snapshots are one more."""
        self.pages = pages
        self.pool = pages.pool
        self.snapshots = pages.index
        self.group = group
        self.is_on = pages.pool.num_pages > 0
        assert not self.is_on or pages.pool.num_pages >= MIN_STATES, "no room for a snapshot"
        self._held: dict[RequestId, _Held] = {}
        # The last passing snapshots of ended requests by name, with their last ones that are not.
        self._ended: dict[bytes, bytes | None] = {}

    # Prefixes

    def longest(self, hashes: Sequence[bytes], most: int) -> int:
        """The largest number of hashes, at most `most`, behind which there is a snapshot, or a copy
        of one."""
        if not self.is_on:
            return most
        lengths = range(most, 0, -1)
        return next((n for n in lengths if self.name_of(hashes[n - 1]) in self.pages), 0)

    def names(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The name of the snapshot behind a prefix; none if the prefix is empty."""
        return [self.name_of(block_hash) for block_hash in hashes[-1:]] if self.is_on else []

    def name_of(self, block_hash: bytes) -> bytes:
        """The name of the snapshot behind the block with this hash."""
        return name_in_group(block_hash, self.group)

    def num_missing(self, hashes: Sequence[bytes]) -> int:
        """Slots that lack for a request to start behind this prefix; 0 or negative if none do."""
        if not self.is_on:
            return 0
        return 1 + self.pool.num_idle(self.names(hashes)) - self.pool.num_available

    def snapshot_ends(self, request: Request, start: int, stop: int, block_size: int) -> list[int]:
        """After how many tokens a step that computes `[start, stop)` writes snapshots: after the
        last full block of the prompt, of all tokens so far, and of each block of the output, after
        the last full block before each checkpoint, and at intervals within long prompts, so that
        one prompt takes at most a quarter of the slots. Between these, passing ones are written,
        so that a retry of a prompt that is aborted goes on near where it stopped. A prompt of
        which only log-probabilities are read has them at its checkpoints only: no chat continues
        it."""
        ends = {at // block_size * block_size for at in request.spec.ends}
        if request.spec.pooling is not None and request.spec.pooling.token_ids:
            return sorted(end for end in ends if start < end <= stop)
        prompt_len, most = request.prompt_len, max(1, self.pool.num_pages // 4)
        interval = SNAPSHOT_TOKENS * -(-prompt_len // (SNAPSHOT_TOKENS * most))
        interval = _whole_blocks(interval, block_size)
        last = (prompt_len - 1) // block_size * block_size
        ends.update(range(interval, last, interval))
        ends.add(last)
        ends.add((request.num_tokens - 1) // block_size * block_size)
        shortest = _whole_blocks(SNAPSHOT_TOKENS, block_size)
        between = min(stop, last) // shortest * shortest
        if between > start and between not in ends:
            self._held[request.request_id].between.add(between)
            ends.add(between)
        if start >= prompt_len:
            ends.add(stop // block_size * block_size)
        return sorted(end for end in ends if start < end <= stop)

    # Slots of requests

    def start(self, request_id: RequestId, hashes: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """Give a request a slot of its own, and the snapshot behind the prefix that it shares. If
        that is not on the device, returns the slot to load it into, with its name."""
        if not self.is_on:
            return []
        assert request_id not in self._held, "a request has one state"
        names = self.names(hashes)
        missing = [name for name in names if name not in self.snapshots]
        snapshot = self.pool.take(names[0]) if names and not missing else None
        (slot,) = self.pool.allocate(1)
        source = NO_STATE if snapshot is None else snapshot
        began = names[0] if snapshot is not None and names[0] in self._ended else None
        self._held[request_id] = _Held(
            slot, slot if missing else source, snapshot, began_behind=began
        )
        return [(slot, name) for name in missing]

    def plan(self, request_id: RequestId, start: int, ends: Sequence[int]) -> StateSlots:
        """The slots of a step that computes the request's tokens from `start` on, and writes
        snapshots of the states after `ends` tokens, as far as there are slots for them."""
        held = self._held[request_id]
        snapshots = []
        for end in ends:
            if self.pool.num_available:
                (slot,) = self.pool.allocate(1)
                held.written.append(_Written(end, slot))
                snapshots.append(Snapshot(end - start, slot))
        source, held.source = held.source, held.slot
        return StateSlots(held.slot, source, tuple(snapshots))

    @property
    def num_for_drafts(self) -> int:
        """Drafts whose rows have slots: all that are available but one, so that a request can
        start."""
        return max(0, self.pool.num_available - 1) if self.is_on else maxsize

    def plan_drafts(
        self, request_id: RequestId, planned: StateSlots, drafts: RowsOfDrafts
    ) -> StateSlots:
        """The slots of a decode that was `planned` without its drafts: also one for the state after
        each row but the last. A snapshot of the first row is one of them; the last row has one too
        if it is wanted and a slot is left."""
        start, num_drafts, has_snapshot = drafts
        held, stop = self._held[request_id], start + 1 + num_drafts
        known = dict(planned.snapshots)
        rows = []
        num_rows = num_drafts + (has_snapshot and self.pool.num_available > num_drafts)
        for count in range(1, num_rows + 1):
            slot = known.get(count)
            if slot is None:
                (slot,) = self.pool.allocate(1)
                held.written.append(_Written(start + count, slot))
            rows.append(Snapshot(count, slot))
        held.drafted = range(start, stop)
        return planned._replace(snapshots=tuple(rows))

    def commit(
        self,
        request_id: RequestId,
        num_computed: int,
        prompt_len: int,
        hashes: Sequence[bytes],
        block_size: int,
    ) -> list[int]:
        """A step of the request has returned, with which so many tokens are computed: publish its
        snapshots, which are at the ends of blocks. Of the passing ones only the newest is kept.
        Returns the places of the blocks behind which they are."""
        held, places = self._held[request_id], []
        if held.read_once is not None:
            self.pool.drop(held.read_once)
            held.read_once = None
        # Drafts may follow a chunk that is in flight: then the chunk returns first.
        drafted = held.drafted
        if drafted is not None and num_computed <= drafted.start:
            drafted = None
        done = [one for one in held.written if one.num_tokens <= num_computed]
        held.written = [one for one in held.written if one.num_tokens > num_computed]
        for end, slot in done:
            if not end % block_size and end // block_size <= len(hashes):
                place = end // block_size - 1
                name = self.name_of(hashes[place])
                is_passing = end >= prompt_len or end in held.between
                if self._publish(held, slot, name, is_passing=is_passing):
                    places.append(place)
            if drafted is not None and end == num_computed and end != drafted.stop:
                held.source = held.read_once = slot
            else:
                self.pool.drop(slot)
        if drafted is not None:
            for _, slot in held.written:  # the states of rejected drafts
                self.pool.drop(slot)
            held.written, held.drafted = [], None
        newest = self.snapshots.find(held.passing or b"")
        if newest is not None:
            self.pool.postpone_save(newest)
        return places

    def _publish(self, held: _Held, slot: int, name: bytes, *, is_passing: bool) -> bool:
        """Returns False if there is such a snapshot already."""
        if name in self.snapshots:
            return False
        self.snapshots.publish(slot, name, None)
        if held.began_behind is not None:  # the chat goes on from here
            self.pool.age(held.began_behind)
            self.pool.age(self._ended.pop(held.began_behind, None) or b"")
            held.began_behind = None
        self._forget(held.passing)
        held.passing = name if is_passing else None
        held.last = held.last if is_passing else name
        return True

    def _forget(self, name: bytes | None) -> None:
        """Evict a snapshot that no request reads."""
        if name is not None and name in self.snapshots:
            self.pool.discard(self.snapshots.page_of(name))

    # Swapping

    def current(self, request_id: RequestId) -> "array[int]":
        """The slot with the request's state, from which it is swapped out."""
        return array("i", [self._held[request_id].source] if self.is_on else ())

    def refill(self, request_id: RequestId) -> "array[int]":
        """The own slot of a request that has just been started, into which its state is swapped
        in."""
        if not self.is_on:
            return array("i")
        held = self._held[request_id]
        held.source = held.slot
        return array("i", [held.slot])

    def release(self, request_id: RequestId) -> None:
        """Free the request's slots."""
        held = self._held.pop(request_id, None)
        if held is not None:
            for slot in held.slots():
                self.pool.drop(slot)
            name = held.passing or b""
            passing = self.snapshots.find(name)
            if passing is not None:
                self.pool.allow_save(passing)
                self._ended[name] = held.last
                while len(self._ended) > self.pool.num_pages:  # some of them are evicted
                    del self._ended[next(iter(self._ended))]

    def reset(self) -> None:
        """The worker is lost: no request has any slot."""
        self._held.clear()
        self._ended.clear()

    def num_leaked(self, live: Container[RequestId]) -> int:
        """Slots whose request is not live; anything but 0 is a leak."""
        return sum(len(held.slots()) for owner, held in self._held.items() if owner not in live)

    def check(self, owners: Container[RequestId]) -> None:
        """Assert that every slot is in exactly one state, and that only `owners` have one."""
        holders = [0] * self.pool.num_pages
        for owner, held in self._held.items():
            assert owner in owners, "a state without blocks"
            for slot in held.slots():
                holders[slot] += 1
            assert holders[held.slot] == 1, "a request's own state is shared"
        self.pages.check(holders)


def _whole_blocks(num_tokens: int, block_size: int) -> int:
    """So many tokens, rounded up to whole blocks."""
    return -(-num_tokens // block_size) * block_size
