"""Attention of a stage whose layers differ in window, soft cap, sinks or sizes.

Layers with equal specs are a group, and each group has a backend of its own over the KV tensors of
its layers. A stage with equal layers gets its backend directly, without this module's dispatch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    CapturableAttention,
    KVTensors,
    RaggedLayout,
    RecordableAttention,
    RopeAngles,
)

MakesBackend = Callable[[AttentionSpec, KVTensors], AttentionBackend]


class _Place(NamedTuple):
    """Where a layer of the stage is computed."""

    backend: AttentionBackend
    layer: int  # within its group


def attention_over(
    specs: Sequence[AttentionSpec], cache: KVTensors, make: MakesBackend
) -> AttentionBackend:
    """The attention of a stage; `specs` has one entry per layer.

    It is recordable or capturable if the backends of all groups are.
    """
    groups: dict[AttentionSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        groups.setdefault(spec, []).append(layer)
    if len(groups) == 1:
        return make(specs[0], cache)
    places: dict[int, _Place] = {}
    for spec, layers in groups.items():
        backend = make(spec, cache.of_layers(layers))
        places |= {layer: _Place(backend, at) for at, layer in enumerate(layers)}
    backends = list({id(place.backend): place.backend for place in places.values()}.values())
    if all(isinstance(each, RecordableAttention) for each in backends):
        return RecordableMixedAttention(backends, places)
    if all(isinstance(each, CapturableAttention) for each in backends):
        return CapturableMixedAttention(backends, places)
    return MixedAttention(backends, places)


class MixedAttention:
    """An `AttentionBackend` that passes each layer to the backend of its group."""

    def __init__(self, backends: Sequence[AttentionBackend], places: dict[int, _Place]) -> None:
        self._backends = backends
        self._places = places

    def plan(self, layout: RaggedLayout) -> None:
        for backend in self._backends:
            backend.plan(layout)

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeAngles | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        place = self._places[layer]
        return place.backend.run(place.layer, q, k, v, rope, sinks)


class RecordableMixedAttention(MixedAttention, RecordableAttention):
    """All groups run kernels of the CPU's thread pool only."""

    @property
    def plan_key(self) -> bytes:
        keys = [each.plan_key for each in self._backends if isinstance(each, RecordableAttention)]
        return b"".join(keys) if all(keys) else b""


class CapturableMixedAttention(MixedAttention):
    """All groups can be captured in a CUDA graph."""

    def plan_captured(self, layout: RaggedLayout) -> None:
        for backend in self._capturable:
            backend.plan_captured(layout)

    def baked(self, num_rows: int) -> tuple[int, ...]:
        return tuple(value for each in self._capturable for value in each.baked(num_rows))

    @property
    def _capturable(self) -> list[CapturableAttention]:
        return [each for each in self._backends if isinstance(each, CapturableAttention)]
