"""The KV cache of one worker: which layers share block tables and tensors, and how many blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.step import WorkerSettings
from engine.worker.device import Device
from engine.worker.model.host_pool import choose_num_host_blocks
from engine.worker.model.kv_groups import KVGroups
from engine.worker.model.kv_tensors import choose_num_blocks
from engine.worker.model.layout import LayoutLimits
from engine.worker.ports import BlockMover, KVCapacity, KVTensors, ModelShape, Shard


@dataclass(frozen=True, slots=True)
class StageKV:
    """Sizes and allocates the KV cache of a worker's layers."""

    device: Device
    settings: WorkerSettings
    shard: Shard
    groups: KVGroups

    @property
    def layer_groups(self) -> Sequence[int]:
        """The layer group of each layer of the stage; empty if the model keeps all KV."""
        return () if self.groups.keeps_all else self.groups.in_stage(self.shard.span)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on this worker, in one layer group."""
        return self.device.block_bytes(self._tensors_shape)

    @property
    def _tensors_shape(self) -> ModelShape:
        """The shape of this worker's KV tensors, which layers of different groups share."""
        return self._shape_of(self.shard.local_shape, self.shard.span)

    def _shape_of(self, shape: ModelShape, span: range) -> ModelShape:
        return replace(shape, num_layers=1 + max(self.groups.tensors(span)), attention=())

    def choose_num_blocks(self, capacity: KVCapacity, max_model_len: int) -> tuple[int, int]:
        """The numbers of device and host blocks that fit. Raises `StartupError`."""
        settings, own_bytes = self._own_settings(), self.block_bytes
        num_blocks = choose_num_blocks(
            settings, own_bytes, max_model_len, capacity, self.groups.windows
        )
        left = capacity.left_on_host(num_blocks * own_bytes)
        return num_blocks, choose_num_host_blocks(settings, own_bytes, left)

    def _own_settings(self) -> WorkerSettings:
        """The settings with this worker's share of `kv_bytes` and `host_kv_bytes`."""
        shape, own_bytes = self.shard.shape, self.block_bytes
        whole_bytes = self.device.block_bytes(self._shape_of(shape, range(shape.num_layers)))
        kv, host = self.settings.kv_bytes, self.settings.host_kv_bytes
        return replace(
            self.settings,
            kv_bytes=max(1, kv * own_bytes // whole_bytes) if kv else 0,
            host_kv_bytes=max(1, host * own_bytes // whole_bytes) if host else 0,
        )

    def allocate(self, num_blocks: int) -> KVTensors:
        """A cache of zeros."""
        return self.device.allocate(self._tensors_shape, num_blocks)

    def by_layer(self, cache: KVTensors) -> KVTensors:
        """The same cache with the tensors of each layer of the stage."""
        if self.groups.keeps_all:
            return cache
        return cache.of_layers(self.groups.tensors(self.shard.span))

    def mover(self, cache: KVTensors, num_host_blocks: int) -> BlockMover:
        """Moves blocks between the cache and so many host blocks, which it allocates."""
        return self.device.mover(cache, self._tensors_shape, num_host_blocks)

    def limits(self, max_model_len: int, num_blocks: int) -> LayoutLimits:
        """The bounds of the indices in a step over so many blocks."""
        return LayoutLimits(
            self.shard.shape.vocab_size,
            max_model_len,
            num_blocks,
            self.settings.block_size,
            self.groups.windows,
        )
