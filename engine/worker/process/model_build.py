"""Builds this worker's layers, in a form that can have LoRA adapters."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from engine.lora import LoraReport
from engine.worker.device import Device, Progress
from engine.worker.lora.loading import Loras
from engine.worker.lora.model import LoraModel, linear_sizes, with_loras
from engine.worker.lora.named_linears import NamedLinears
from engine.worker.ports import ImageEncoder, ModelShape, MtpModel, Operators, Shard, StageModel
from engine.worker.weights.checkpoint import Checkpoint, NoOperators
from engine.worker.weights.packed_cache import PackedCache
from engine.worker.weights.random import RandomWeights
from engine.worker.weights.source import Weights
from engine.worker_settings import WorkerSettings


class BuiltModel(NamedTuple):
    """This worker's layers, and the layers behind the pooling, for multi-token prediction and of
    the image encoder, None without any."""

    model: LoraModel
    operators: Operators
    head: Callable[[Tensor], Tensor] | None
    mtp: MtpModel | None
    encoder: ImageEncoder | None


def build_model(
    checkpoint: Checkpoint,
    weights: Weights | RandomWeights,
    shard: Shard,
    device: Device,
    packed: PackedCache,
    own_bytes: int,
    *,
    has_mtp: bool = False,
) -> BuiltModel:
    """This worker's layers, whose linears can have LoRA adapters."""
    operators, named = device.operators(), NamedLinears()
    with device.source(weights, packed, own_bytes) as source:
        built = checkpoint.family.build(named.source(source), shard, named.operators(operators))
        head = checkpoint.build_head(source, shard)
        mtp = checkpoint.build_mtp(source, shard.shape, operators, built) if has_mtp else None
        encoder = checkpoint.build_encoder(source, operators) if shard.is_first else None
    weights.drop_pages()

    def recorded(model: StageModel) -> StageModel:
        return device.recorded(model, operators, shard.num_ranks)

    model = with_loras(recorded(built), built, named, recorded)
    return BuiltModel(model, operators, head, mtp, encoder)


def linear_sizes_of(
    checkpoint: Checkpoint, weights: Weights | RandomWeights, shape: ModelShape
) -> dict[str, tuple[int, int]]:
    """The linears of the whole model by name, from a model without contents."""
    named = NamedLinears()
    source, operators = named.source(weights.outline()), named.operators(NoOperators())
    return linear_sizes(checkpoint.family.build(source, Shard.whole(shape), operators), named)


def load_loras(loras: Loras, settings: WorkerSettings, progress: Progress) -> list[LoraReport]:
    """Load the adapters of the settings; a report may have an error."""
    reports = []
    for done, spec in enumerate(settings.loras):
        progress("LoRA adapters", done, len(settings.loras))
        reports.append(loras.load(spec))
    return reports
