"""FoundPrefix: how much of a request's KV was in the cache when it was last looked for."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class FoundPrefix:
    """What the search for a request's blocks (`engine.kv.prefix_search`) goes on from."""

    num_matched: int = 0  # leading blocks that were on the device
    num_evictions_seen: int = 0  # when `num_matched` was last checked: engine.kv.prefix_index
    num_drops_seen: int = 0  # in the tiers below, likewise
    num_reusable: int = 0  # leading blocks behind which it can start
    reusable_hashes: list[bytes] = field(default_factory=list)  # the last used of its digests
    reusable_at: tuple[int, int] | None = None  # the state for which `num_reusable` was found
    awaits_lookup: bool = False  # until a shared store has answered what it has of the prompt
