"""KVShape: how many pages of each kind a model's KV cache has, on the device and in each tier."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVShape:
    """The size of a KV cache.

    `windows` has the window of each layer group, None for one that keeps all KV; a model without
    groups keeps no KV, and its requests hold no blocks. At most `chunk` tokens of a request are
    planned beyond those that are computed. A model with recurrent layers has `num_states` slots for
    states. With `saves_on_host` the host tier also keeps copies of cached pages.
    `num_store_names` bounds what is known of a shared store.
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    saves_on_host: bool = False
    windows: tuple[int | None, ...] = (None,)
    chunk: int = 0
    num_states: int = 0
    num_host_states: int = 0
    num_disk_states: int = 0
    num_store_names: int = 0

    def __post_init__(self) -> None:
        assert self.num_blocks > 0, "a KV cache has at least one block"
        assert self.block_size > 0, "a block has at least one slot"

    @property
    def num_slots(self) -> int:
        """Slots on the device, each of one token in one layer group."""
        return self.num_blocks * self.block_size
