"""The KV cache of one worker: which layers share block tables and tensors, how many blocks and
recurrent states there are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.errors import StartupError
from engine.worker.device import Device
from engine.worker.model.kv.data_plane import DataPlane
from engine.worker.model.kv.host_pool import choose_num_host_blocks
from engine.worker.model.kv.kv_groups import KVGroups
from engine.worker.model.kv.kv_tensors import bytes_per_block, choose_num_blocks, size_text
from engine.worker.model.kv.recurrent_states import RecurrentStates, StateMover, bytes_per_state
from engine.worker.model.layout import LayoutLimits
from engine.worker.ports import BlockMover, KVCapacity, KVTensors, ModelShape, Shard
from engine.worker_settings import WorkerSettings

STATES_PER_REQUEST = 3  # its own, and the snapshots of its prompt and of its output
MIN_STATES = 2  # the snapshot that a request starts behind, and its own


class KVCounts(NamedTuple):
    """How many blocks and state slots there are, on the device and on the host."""

    blocks: int
    host_blocks: int
    states: int
    host_states: int


@dataclass(frozen=True, slots=True)
class StageKV:
    """Sizes and allocates the KV cache of a worker's layers."""

    device: Device
    settings: WorkerSettings
    shard: Shard
    groups: KVGroups
    draft_block_bytes: int = 0  # a draft model's block, whose cache has as many blocks

    @property
    def layer_groups(self) -> Sequence[int]:
        """The layer group of each layer of the stage; empty if the model keeps all KV or none."""
        has_groups = self.groups.windows and not self.groups.keeps_all
        return self.groups.in_stage(self.shard.span) if has_groups else ()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on this worker, in one layer group."""
        return self._bytes_of(self._tensors_shape)

    def _bytes_of(self, shape: ModelShape) -> int:
        size = self.settings.kv.block_size
        return bytes_per_block(shape, shape.num_layers, size, self.device.formats.kv_dtype)

    @property
    def _tensors_shape(self) -> ModelShape:
        """The shape of this worker's KV tensors, which layers of different groups share."""
        return self._shape_of(self.shard.local_shape, self.shard.span)

    def _shape_of(self, shape: ModelShape, span: range) -> ModelShape:
        num_layers = 1 + max(self.groups.tensors(span), default=-1)
        if not num_layers:
            raise StartupError(
                f"layers {span.start} to {span.stop - 1} of a stage have no attention; "
                "use fewer --pipeline-stages"
            )
        return replace(shape, num_layers=num_layers, attention=(), recurrent=())

    @property
    def state_bytes(self) -> int:
        """Bytes of a state slot on this worker; 0 without recurrent layers."""
        return bytes_per_state(self.shard.local_shape.recurrent_layers)

    def choose_counts(
        self, capacity: KVCapacity, max_model_len: int, plane: DataPlane | None
    ) -> "KVCounts":
        """The same numbers on all workers of the model, as many as fit on each. All workers call
        this together. Raises `StartupError`."""
        if limit := self._own_settings().kv.kv_memory_limit:
            capacity = capacity._replace(usual=min(capacity.usual, limit))
        states = self._choose_num_states(capacity)
        if plane is not None:
            on_device = plane.minimum("states", states[0])
            states = on_device, plane.minimum("host states", states[1])
        blocks = self._choose_num_blocks(capacity, max_model_len, states)
        if plane is not None:
            on_device = plane.minimum("blocks", blocks[0])
            blocks = on_device, plane.minimum("host blocks", blocks[1])
        return KVCounts(*blocks, *states)

    def _choose_num_states(self, capacity: KVCapacity) -> tuple[int, int]:
        """The numbers of device and host slots for recurrent states: enough for the largest batch
        and its snapshots, but at most half of the memory for KV."""
        settings, own_bytes = self._own_settings(), self.state_bytes
        if not self.shard.shape.recurrent_layers:
            return 0, 0
        memory = settings.kv.kv_memory or (
            capacity.most if settings.kv.kv_slots else capacity.usual
        )
        enough = STATES_PER_REQUEST * settings.max_batch_size + MIN_STATES
        fitting = memory // 2 // own_bytes if own_bytes else enough  # a stage may have none
        num_states = settings.kv.num_states or min(enough, fitting)
        if num_states < MIN_STATES:
            raise StartupError(
                f"half of the memory for the KV cache ({size_text(memory)}) is less than "
                f"{MIN_STATES} recurrent states ({size_text(own_bytes)} each)"
            )
        host_states = settings.tiers.host_kv_memory // 2 // own_bytes if own_bytes else enough
        return num_states, min(enough, host_states) if settings.tiers.host_kv_memory else 0

    def _choose_num_blocks(
        self, capacity: KVCapacity, max_model_len: int, num_states: tuple[int, int]
    ) -> tuple[int, int]:
        """The numbers of device and host blocks that fit beside so many device and host states.

        The blocks of a model that keeps no KV hold the keys and values of one step.
        """
        if not self.groups.windows:
            most = max(self.settings.max_batch_tokens, max_model_len)  # a prompt is not cut
            return -(-most // self.settings.kv.block_size) + self.settings.max_batch_size, 0
        settings, own_bytes = self._own_settings(), self.block_bytes
        on_device, on_host = (count * self.state_bytes for count in num_states)
        kv, host = settings.kv, settings.tiers.host_kv_memory
        capacity = capacity._replace(
            most=capacity.most - on_device,
            usual=capacity.usual - on_device,
            host=capacity.host - on_host - (on_device if capacity.is_shared else 0),
        )
        settings = replace(
            settings,
            kv=replace(kv, kv_memory=kv.kv_memory and max(1, kv.kv_memory - on_device)),
            tiers=replace(settings.tiers, host_kv_memory=host and max(1, host - on_host)),
        )
        device_bytes = own_bytes + self.draft_block_bytes
        num_blocks = choose_num_blocks(
            settings, device_bytes, max_model_len, capacity, self.groups.windows
        )
        left = capacity.left_on_host(num_blocks * device_bytes)
        return num_blocks, choose_num_host_blocks(settings, own_bytes, left)

    def _own_settings(self) -> WorkerSettings:
        """The settings with this worker's share of the bytes for KV on the device and the host."""
        shape, own_bytes = self.shard.shape, self.block_bytes
        whole_bytes = self._bytes_of(self._shape_of(shape, range(shape.num_layers)))
        kv, tiers = self.settings.kv, self.settings.tiers

        def share(size: int) -> int:
            return size and max(1, size * own_bytes // whole_bytes)

        return replace(
            self.settings,
            kv=replace(
                kv,
                kv_memory=share(kv.kv_memory or 0) or None,
                kv_memory_limit=share(kv.kv_memory_limit),
            ),
            tiers=replace(tiers, host_kv_memory=share(tiers.host_kv_memory)),
        )

    def allocate(self, num_blocks: int) -> KVTensors:
        """A cache of zeros."""
        return self.device.memory.kv(self._tensors_shape, num_blocks)

    def states(self, num_states: int) -> RecurrentStates | None:
        """The states of this worker's recurrent layers; None if the model has none."""
        local = self.shard.local_shape
        if not num_states:
            return None
        zeros = self.device.memory.states
        return RecurrentStates(local.recurrent_layers, num_states, zeros)

    def by_layer(self, cache: KVTensors) -> KVTensors:
        """The same cache with the tensors of each layer of the stage."""
        if self.groups.keeps_all and not self.groups.shares_kv:
            return cache
        return cache.of_layers(self.groups.tensors(self.shard.span))

    def mover(self, cache: KVTensors, num_host_blocks: int) -> BlockMover:
        """Moves blocks between the cache and so many host blocks, which it allocates."""
        return self.device.memory.mover(cache, self._tensors_shape, num_host_blocks)

    def state_mover(
        self, kv: BlockMover, states: RecurrentStates | None, num_host_states: int
    ) -> BlockMover:
        """Moves states too, if there are any, to so many host slots, which it allocates."""
        if states is None:
            return kv
        shapes = self.shard.local_shape.recurrent_layers
        host = RecurrentStates(shapes, num_host_states)
        return StateMover(states, host, kv, self.device.transfers())

    def limits(self, max_model_len: int, num_blocks: int, num_states: int) -> LayoutLimits:
        """The bounds of the indices in a step over so many blocks and states."""
        return LayoutLimits(
            self.shard.shape.vocab_size,
            max_model_len,
            num_blocks,
            self.settings.kv.block_size,
            self.groups.windows,
            num_states,
        )
