"""Builds this worker's layers, in a form that can have LoRA adapters.

The profile run: the largest possible step on a small cache of its own, to measure its memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.lora import LoraReport
from engine.step import RequestId, SampleSpec, SamplingParams, Step, StepEntry, StepId
from engine.worker.device import Device, Formats, Progress
from engine.worker.lora.loading import Loras
from engine.worker.lora.model import LoraModel, linear_sizes, with_loras
from engine.worker.lora.named_linears import NamedLinears
from engine.worker.model.kv.recurrent_states import RecurrentStates
from engine.worker.model.layout import build_layout
from engine.worker.model.stage import Stage
from engine.worker.ports import (
    ImageEncoder,
    KVTensors,
    ModelShape,
    MtpModel,
    Operators,
    Shard,
    StageModel,
)
from engine.worker.process.stage_kv import StageKV
from engine.worker.sampling.sampler import Sampler
from engine.worker.weights.checkpoint import Checkpoint, NoOperators
from engine.worker.weights.formats import FORMATS
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

    model = with_loras(recorded(built), built, named, recorded, operators.loras.slots)
    return BuiltModel(model, operators, head, mtp, encoder)


def weight_bytes(checkpoint: Checkpoint, formats: Formats, num_parameters: int) -> int:
    """The least memory that weights take in the formats of a device."""
    format = formats.linear or FORMATS.get(formats.weights)
    if format is not None:
        return num_parameters * int(format.bits) // 8
    files = checkpoint.files.files if checkpoint.files is not None else ()
    return min(num_parameters, sum(path.stat().st_size for path in files))  # 8 bits or fewer


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


ALL_FILTERS = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)


@dataclass(frozen=True, slots=True)
class ProfileRun:
    """Runs the step when called. All ranks of a stage must call it together; stages need not."""

    settings: WorkerSettings
    shard: Shard
    max_model_len: int
    device: Device
    kv: StageKV
    make_stage: Callable[[KVTensors, RecurrentStates | None], Stage]
    sampler: Sampler

    def __call__(self) -> None:
        """Run as many requests and tokens as a step may have; every request samples a token."""
        shape, step = self.shard.shape, self._step()
        num_blocks = -(-self._tokens_each // self.settings.kv.block_size)
        if not self.kv.groups.windows:  # then the blocks of requests are different ones
            num_blocks *= self._num_requests
        num_states = 1 if shape.recurrent_layers else 0
        layout = build_layout(step, self.kv.limits(self.max_model_len, num_blocks, num_states))
        stage = self.make_stage(self.kv.allocate(num_blocks), self.kv.states(num_states))
        hidden = None
        with torch.inference_mode(), self.device.pool.awake():
            if not self.shard.is_first:
                hidden = self.device.memory.zeros(layout.num_tokens, self.shard.received_width)
            if not self.shard.is_last:
                stage.run(layout, hidden)
                return
            found = stage.read(layout, hidden)
            logits = stage.head(found) if self.shard.has_logits else None
            if logits is not None:
                specs = [entry.sample for entry in step.entries if entry.sample is not None]
                self.sampler.sample(logits, specs, range(len(specs)))

    @property
    def _num_requests(self) -> int:
        return min(self.settings.max_batch_size, self.settings.max_batch_tokens)

    @property
    def _tokens_each(self) -> int:
        """The step's tokens, shared evenly."""
        each = -(-self.settings.max_batch_tokens // self._num_requests)
        return min(each, self.max_model_len)

    def _step(self) -> Step:
        """All requests share the same blocks, since their KV is not used."""
        count = self._tokens_each
        blocks = np.arange(-(-count // self.settings.kv.block_size), dtype="<i4").tobytes()
        entries = (
            StepEntry(RequestId(request), 0, (0,) * count, blocks, SampleSpec(ALL_FILTERS))
            for request in range(self._num_requests)
        )
        return Step(StepId(-3), tuple(entries))
