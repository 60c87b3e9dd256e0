"""What a worker is made of."""

from dataclasses import dataclass

from engine.worker.device import Device
from engine.worker.lora.loading import Loras
from engine.worker.model.kv.data_plane import DataPlane
from engine.worker.model.layout import LayoutLimits
from engine.worker.model.stage import Stage
from engine.worker.ports import BlockMover, Shard
from engine.worker.process.drafts.draft_rows import Drafter
from engine.worker.process.images import WorkerImages
from engine.worker.process.kept_kv import KeptKV
from engine.worker.sampling.logits_output import ReadsOutput
from engine.worker_settings import Placement, WorkerReport


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a worker; those that its model or its place does not need are None."""

    device: Device
    stage: Stage
    reader: ReadsOutput | None  # what follows the layers, on the last stage
    drafter: Drafter | None
    mover: BlockMover
    kept: KeptKV
    images: WorkerImages
    loras: Loras
    limits: LayoutLimits
    report: WorkerReport
    placement: Placement
    shard: Shard
    plane: DataPlane | None  # if there are other workers of the model
    token_plane: DataPlane | None  # if sampled tokens are sent back to the first stage
