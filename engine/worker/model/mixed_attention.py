"""Attention of a stage whose layers differ in window, soft cap, sinks or sizes.

Layers with equal specs and block tables have a backend of their own, over the KV tensors of these
layers. A stage with equal layers gets its backend directly, without this module's dispatch, unless
its KV is kept in layer groups (`engine.worker.model.kv.kv_groups`).

Attention in which the tokens of an image attend to each other, by a backend that cannot do it.

Few steps have tokens of images: another backend, which reads the same cache, computes these.
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


def beside_images(usual: AttentionBackend, of_images: AttentionBackend) -> AttentionBackend:
    """Attention by `of_images` in steps with tokens of images, and else by the `usual` backend."""
    if isinstance(usual, CapturableAttention):
        return CapturableImageAttention(usual, of_images)
    return ImageAttention(usual, of_images)


class ImageAttention:
    """An `AttentionBackend` of two."""

    def __init__(self, usual: AttentionBackend, of_images: AttentionBackend) -> None:
        self._usual = usual
        self._of_images = of_images
        self.run: Callable[..., Tensor] = usual.run  # the backend that was planned last

    def plan(self, layout: RaggedLayout) -> None:
        planned = self._of_images if layout.encoded else self._usual
        planned.plan(layout)
        self.run = planned.run


class CapturableImageAttention(ImageAttention):
    """The usual backend can be captured in CUDA graphs, which hold no tokens of images."""

    def __init__(self, usual: CapturableAttention, of_images: AttentionBackend) -> None:
        super().__init__(usual, of_images)
        self._capturable = usual

    def plan_captured(self, layout: RaggedLayout) -> tuple[int, ...]:
        self.run = self._capturable.run
        return self._capturable.plan_captured(layout)


MakesBackend = Callable[[AttentionSpec, KVTensors], AttentionBackend]


class _Place(NamedTuple):
    """The backend and the layer number by which a layer of the stage is computed."""

    backend: AttentionBackend
    layer: int  # among those of its backend


class _Planned(NamedTuple):
    """A backend, and the layer group whose layout it is planned with."""

    backend: AttentionBackend
    group: int


def attention_over(
    specs: Sequence[AttentionSpec],
    cache: KVTensors,
    make: MakesBackend,
    groups: Sequence[int] = (),
) -> AttentionBackend:
    """The attention of a stage; `specs` has one entry per layer, and `groups` the layer group of
    each, if steps have a layout per group.

    It is recordable or capturable if all backends are.
    """
    kinds: dict[tuple[AttentionSpec, int], list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault((spec, groups[layer] if groups else 0), []).append(layer)
    if len(kinds) == 1 and not groups:
        return make(specs[0], cache)
    places: dict[int, _Place] = {}
    planned: list[_Planned] = []
    for (spec, group), layers in kinds.items():
        backend = make(spec, cache.of_layers(layers).narrowed(spec.num_kv_heads, spec.head_dim))
        planned.append(_Planned(backend, group))
        places |= {layer: _Place(backend, at) for at, layer in enumerate(layers)}
    if all(isinstance(each.backend, RecordableAttention) for each in planned):
        return RecordableMixedAttention(planned, places)
    if all(isinstance(each.backend, CapturableAttention) for each in planned):
        return CapturableMixedAttention(planned, places)
    return MixedAttention(planned, places)


class MixedAttention:
    """An `AttentionBackend` that passes each layer to the backend of its group."""

    def __init__(self, planned: Sequence[_Planned], places: dict[int, _Place]) -> None:
        self._planned = planned
        self._places = places

    def plan(self, layout: RaggedLayout) -> None:
        for backend, group in self._planned:
            backend.plan(layout.of_group(group))

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rope: RopeAngles | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        place = self._places[layer]
        return place.backend.run(place.layer, q, k, v, rope, sinks)


class RecordableMixedAttention(MixedAttention, RecordableAttention):
    """All groups run kernels of the CPU's thread pool only."""

    @property
    def plan_key(self) -> bytes:
        return b"".join(each.plan_key for each in self._recordable)

    @property
    def has_decodes_only(self) -> bool:
        return all(each.has_decodes_only for each in self._recordable)

    @property
    def _recordable(self) -> list[RecordableAttention]:
        backends = [each.backend for each in self._planned]
        return [each for each in backends if isinstance(each, RecordableAttention)]


class CapturableMixedAttention(MixedAttention):
    """All groups can be captured in a CUDA graph."""

    def plan_captured(self, layout: RaggedLayout) -> tuple[int, ...]:
        return tuple(
            value
            for backend, group in self._capturable
            for value in backend.plan_captured(layout.of_group(group))
        )

    @property
    def _capturable(self) -> list[tuple[CapturableAttention, int]]:
        return [
            (backend, group)
            for backend, group in self._planned
            if isinstance(backend, CapturableAttention)
        ]
