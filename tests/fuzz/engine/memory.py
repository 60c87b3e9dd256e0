"""What the KV blocks and state slots of the device and of the tiers below hold, as digests."""

from array import array
from typing import TYPE_CHECKING, NamedTuple

from engine.step import HASH_BYTES, Direction, Page, PageKind, Tier
from tests.fuzz.engine.language import UNREADABLE
from tests.fuzz.engine.wrong import Wrong

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator
    from random import Random

    from engine.step import BlockMove

Content = tuple[int, ...]  # of the slots of a block, or of one state


class Copy(NamedTuple):
    """Content in a tier below, and the name under which it was saved; b"" if it was swapped."""

    content: Content
    name: bytes


class Memory:
    """Blocks, states and copies; `unread_rate` of the reads from disk or store fail."""

    def __init__(
        self, block_size: int, unread_rate: float, random: "Random", counts: "Counter[str]"
    ) -> None:
        self.block_size = block_size
        self._unread_rate = unread_rate
        self._random = random
        self._counts = counts
        self._disk: dict[tuple[PageKind, int], Copy] = {}
        self.store: dict[bytes, Content] = {}
        self._named: dict[bytes, Content] = {}  # all that was ever saved
        self.lose()

    def lose(self) -> None:
        """The worker died; the disk and the store keep what they have."""
        self._blocks: dict[int, list[int]] = {}
        self._drafted: dict[int, list[int]] = {}
        self.states: dict[int, int] = {}
        self._host: dict[tuple[PageKind, int], Copy] = {}

    def block(self, number: int) -> list[int]:
        """The digests in the slots of a block."""
        return self._blocks.setdefault(number, [UNREADABLE] * self.block_size)

    def drafted(self, number: int) -> list[int]:
        """The digests that the draft model's KV has in the slots of a block."""
        return self._drafted.setdefault(number, [UNREADABLE] * self.block_size)

    def move(self, move: "BlockMove", unread: list[Page]) -> None:
        """Copy every block or state of a move."""
        is_state = move.kind is PageKind.SNAPSHOT
        self._counts[f"{move.direction} {move.tier}{' state' if is_state else ''}"] += 1
        for device, slot, name in _pairs(move):
            if move.direction is Direction.OUT:
                content = self._read(device, is_state=is_state)
                self._put(move.tier, (move.kind, slot), Copy(content, name))
                continue
            content_or_none = self._get(move.tier, (move.kind, slot), name)
            if content_or_none is None:
                self._counts["unread"] += 1
                unread.append(Page(move.kind, device))
                content_or_none = (UNREADABLE,) * (1 if is_state else self.block_size)
            self._write(device, content_or_none, is_state=is_state)

    def _read(self, device: int, *, is_state: bool) -> Content:
        if is_state:
            return (self.states.get(device, UNREADABLE),)
        return tuple(self.block(device))

    def _write(self, device: int, content: Content, *, is_state: bool) -> None:
        if is_state:
            (self.states[device],) = content
        else:
            self.block(device)[:] = content
            self._drafted.pop(device, None)

    def _put(self, tier: Tier, key: tuple[PageKind, int], copy: Copy) -> None:
        if copy.name:
            known = self._named.setdefault(copy.name, copy.content)
            if known != copy.content or UNREADABLE in copy.content:
                raise Wrong(f"other content than {known} is saved in {tier}: {copy.content}")
        if tier is Tier.HOST:
            self._host[key] = copy
        elif tier is Tier.DISK:
            self._disk[key] = copy
        else:
            self.store[copy.name] = copy.content

    def _get(self, tier: Tier, key: tuple[PageKind, int], name: bytes) -> Content | None:
        """The copied content; None if it cannot be read, which a host tier can always be."""
        if tier is Tier.HOST:
            copy = self._host.get(key)
            if copy is None or (name and name != copy.name):
                raise Wrong(f"slot {key} of the host does not have what is read")
            return copy.content
        if self._random.random() < self._unread_rate:
            return None
        if tier is Tier.STORE:
            return self.store.get(name)
        copy = self._disk.get(key)
        return None if copy is None or copy.name != name else copy.content


def _pairs(move: "BlockMove") -> "Iterator[tuple[int, int, bytes]]":
    """Device block, slot below and name of each copy."""
    size, hashes = HASH_BYTES, move.hashes
    names = [hashes[at : at + size] for at in range(0, len(hashes), size)]
    devices, slots = array("i", move.device), array("i", move.host)
    return zip(devices, slots, names or [b""] * len(devices), strict=True)
