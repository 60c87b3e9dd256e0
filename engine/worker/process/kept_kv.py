"""KV that outlives a worker: the disk tier and a shared store, and what their contents depend
on."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path

from engine.errors import StartupError
from engine.kv_store import SharedStore, open_store
from engine.step import HASH_VERSION, PageKind, Tier
from engine.worker.model.kv.disk_pool import DiskFiles, folder_of, has_folders, remove_unused
from engine.worker.model.kv.kv_tensors import size_text
from engine.worker.model.kv.recurrent_states import RecurrentStates
from engine.worker.model.kv.tiered_pool import StoredTensors, TieredPool
from engine.worker.ports import BlockMover, KVTensors
from engine.worker.process.stage_kv import StageKV
from engine.worker.transfers import Transfers
from engine.worker.weights.checkpoint import Checkpoint
from engine.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)

STATES = "states"  # folder of the snapshots of recurrent layers, within that of the blocks
KEY_DIGITS = 24


@dataclass(frozen=True, slots=True)
class DiskTier:
    """The files of each kind of page that the model has."""

    files: dict[PageKind, DiskFiles]

    @classmethod
    def open(cls, settings: WorkerSettings, facts: str, kv: StageKV) -> "DiskTier | None":
        """The disk tier of the only worker of a model; None without one. Snapshots have half of
        its bytes. Raises `StartupError`."""
        if not settings.tiers.disk_kv:
            return None
        check_kept(settings, "--disk-kv", kv)
        directory = Path(settings.tiers.disk_kv)
        memory, folder = settings.tiers.disk_kv_memory, folder_of(directory, facts)
        if not folder.exists() and has_folders(directory):
            logger.info(
                "--disk-kv: %s is new; the KV of other models, KV dtypes or versions is not used",
                folder,
            )
        files: dict[PageKind, DiskFiles] = {}
        opened = partial(_files, is_shared=settings.tiers.disk_kv_shared)
        if kv.shard.shape.recurrent_layers:
            memory //= 2
            files[PageKind.SNAPSHOT] = opened(folder / STATES, memory, kv.state_bytes, "snapshot")
        files[PageKind.BLOCK] = opened(folder, memory, kv.block_bytes, "block")
        remove_unused(directory, folder, datetime.now(UTC).timestamp())
        return cls(files)

    def hashes(self, kind: PageKind) -> bytes:
        """The content hashes of all slots of this kind, in their order; zeros for unused slots."""
        return self.files[kind].hashes() if kind in self.files else b""

    def wait(self) -> None:
        """Wait until all queued copies are written."""
        for files in self.files.values():
            files.wait()

    def close(self) -> None:
        """Write what is queued and close the files."""
        for files in self.files.values():
            files.close()


def _files(
    folder: Path, num_bytes: int, slot_bytes: int, what: str, *, is_shared: bool
) -> DiskFiles:
    if num_bytes < slot_bytes:
        raise StartupError(
            f"--disk-kv-memory: {size_text(num_bytes)} for {what}s are less than one {what} "
            f"({size_text(slot_bytes)})"
        )
    return DiskFiles(folder, num_bytes // slot_bytes, slot_bytes, is_shared=is_shared)


def check_kept(settings: WorkerSettings, flag: str, kv: StageKV) -> None:
    """Raise `StartupError` if this worker's KV cannot be kept outside the process."""
    if settings.placement.num_workers > 1:
        raise StartupError(f"{flag} needs a single worker: no stages and no ranks")
    if not kv.groups.windows:
        raise StartupError(f"{flag} is for models that keep KV; an encoder keeps none")


@dataclass(frozen=True, slots=True)
class KeptKV:
    """The disk tier and the shared store of a worker, each None if it has none. `keys` names what
    the contents of the store depend on."""

    disk: DiskTier | None
    store: SharedStore | None
    keys: str = ""

    @classmethod
    def open(
        cls, settings: WorkerSettings, checkpoint: Checkpoint, kv: StageKV, max_model_len: int
    ) -> "KeptKV":
        """Raises `StartupError`."""
        facts = _kv_facts(settings, checkpoint, kv, max_model_len)
        disk = DiskTier.open(settings, f"{_stats(checkpoint)} {facts}", kv)
        if not settings.tiers.kv_store:
            return cls(disk, None)
        check_kept(settings, "--kv-store", kv)
        keys = sha256(f"{_digests(checkpoint)} {facts}".encode()).hexdigest()[:KEY_DIGITS]
        return cls(disk, open_store(settings.tiers.kv_store, keys, lends_memory=True), keys)

    def mover(
        self,
        host: BlockMover,
        cache: KVTensors,
        states: RecurrentStates | None,
        transfers: Transfers,
    ) -> BlockMover:
        """Moves blocks and states to and from the host tier, by `host`, and the tiers here."""
        tensors = {PageKind.BLOCK: (cache.in_memory_order(), cache.num_blocks)}
        if states is not None:
            tensors[PageKind.SNAPSHOT] = list(states.tensors()), states.num_slots
        stored: dict[tuple[Tier, PageKind], StoredTensors] = {}
        for kind, (of_kind, num_rows) in tensors.items():
            if self.disk is not None:
                files = self.disk.files[kind]
                stored[Tier.DISK, kind] = StoredTensors(of_kind, num_rows, files, transfers)
            if self.store is not None:
                stored[Tier.STORE, kind] = StoredTensors(of_kind, num_rows, self.store, transfers)
        return TieredPool(host, stored) if stored else host

    def wait(self) -> None:
        """Wait until all queued copies are written."""
        for one in (self.disk, self.store):
            if one is not None:
                one.wait()

    def close(self) -> None:
        """Write what is queued and close the files and the store."""
        for one in (self.disk, self.store):
            if one is not None:
                one.close()


def _kv_facts(
    settings: WorkerSettings, checkpoint: Checkpoint, kv: StageKV, max_model_len: int
) -> str:
    """All that the bytes of KV blocks and their names depend on, beside the tokens and the
    weights."""
    device, shape = kv.device, kv.shard.shape
    numbers: tuple[object, ...] = (
        HASH_VERSION,
        device.formats.dtype,
        device.formats.kv_dtype,
        device.formats.weights,
        settings.kernels.activation_bits,
    )
    original = shape.original_positions
    if shape.values_from is not None:
        numbers += (shape.head_dim, shape.values_from)
    if original is not None:
        numbers += ("long" if max_model_len > original else "short",)
    return f"{checkpoint.architecture} {numbers} {settings.kv.block_size} {device.kernels}"


def _stats(checkpoint: Checkpoint) -> str:
    """The weights, as this machine names them."""
    stats = [(path.name, path.stat()) for path in _weight_files(checkpoint)]
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return str(files or checkpoint.directory)


def _digests(checkpoint: Checkpoint) -> str:
    """The weights by their bytes, which are the same on every machine."""
    digests = []
    for path in _weight_files(checkpoint):
        with path.open("rb") as file:
            digests.append((path.name, file_digest(file, "blake2b").hexdigest()))
    return str(digests or checkpoint.directory)


def _weight_files(checkpoint: Checkpoint) -> "tuple[Path, ...]":
    return () if checkpoint.files is None else tuple(checkpoint.files.files)
