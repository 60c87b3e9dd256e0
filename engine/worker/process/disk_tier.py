"""The disk tier of a worker: its files and their sizes."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from engine.errors import StartupError
from engine.step import PageKind
from engine.worker.model.kv.disk_pool import DiskFiles, folder_of, has_folders, remove_unused
from engine.worker.model.kv.kv_tensors import size_text
from engine.worker.process.stage_kv import StageKV
from engine.worker_settings import WorkerSettings

logger = logging.getLogger(__name__)

STATES = "states"  # folder of the snapshots of recurrent layers, within that of the blocks


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
