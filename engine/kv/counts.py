"""KVCounts: how many pages are in which state, for metrics and views."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from engine.step import Tier

if TYPE_CHECKING:
    from collections.abc import Container

    from engine.kv.ledger import KVLedger
    from engine.step import RequestId


class TierCounts(NamedTuple):
    """The blocks of a tier by their state."""

    free: int
    held: int
    cached: int
    moving: int


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
    def of(cls, ledger: "KVLedger", live: "Container[RequestId]") -> "KVCounts":
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
