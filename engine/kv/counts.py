"""KVCounts: how many pages are in which state, for metrics and views."""

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

from engine.kv.ledger import KVLedger
from engine.step import RequestId, Tier


class TierCounts(NamedTuple):
    """The blocks of a tier by their state."""

    free: int
    held: int
    cached: int
    moving: int

    def plus(self, other: "TierCounts") -> "TierCounts":
        """The blocks of this tier and of the same tier of another replica."""
        return TierCounts(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class KVCounts:
    """Counts of blocks at one moment. `num_orphans` are pages owned by no live request, of which
    there are none."""

    device: TierCounts
    host: TierCounts
    num_on_disk: int
    num_in_store: int
    num_orphans: int

    @classmethod
    def of(cls, ledger: KVLedger, live: Container[RequestId]) -> "KVCounts":
        """The counts now; `live` are the requests that may hold pages."""
        host, blocks = ledger.blocks.host, ledger.blocks
        return cls(
            TierCounts(
                ledger.num_free - ledger.num_cached,
                ledger.num_held,
                ledger.num_cached,
                ledger.num_moving,
            ),
            TierCounts(
                host.num_free - host.cached.num_replaceable,
                host.num_held,
                len(host.cached),
                host.num_moving,
            ),
            len(blocks.disk),
            len(blocks.lower.get(Tier.STORE, ())),
            ledger.num_leaked(live),
        )

    @property
    def num_used(self) -> int:
        """Device blocks whose content cannot be replaced."""
        return self.device.held + self.device.moving

    def __add__(self, other: "KVCounts") -> "KVCounts":
        """The counts of two replicas together."""
        return KVCounts(
            self.device.plus(other.device),
            self.host.plus(other.host),
            self.num_on_disk + other.num_on_disk,
            self.num_in_store + other.num_in_store,
            self.num_orphans + other.num_orphans,
        )
