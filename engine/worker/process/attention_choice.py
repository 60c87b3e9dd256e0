"""Chooses the attention backend of each kind of layer of a stage."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from engine.errors import StartupError
from engine.worker.device import Device
from engine.worker.model.mixed_attention import attention_over, beside_images
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    KVTensors,
    MakesAttention,
    ModelShape,
    StepLimits,
)
from engine.worker.weights.checkpoint import load_from_table

PLAIN = "reference"  # supports everything
logger = logging.getLogger(__name__)


def attention_specs(
    local: ModelShape,
    dtype: torch.dtype,
    limits: StepLimits,
    *,
    is_batch_invariant: bool,
    choices: str = "",
) -> tuple[AttentionSpec, ...]:
    """Attention over the heads of one worker, for each attention layer of its stage."""
    width = local.num_kv_heads * local.head_dim
    return tuple(
        AttentionSpec(
            num_heads=local.num_heads,
            num_kv_heads=options.num_kv_heads or local.num_kv_heads,
            head_dim=options.head_dim or local.head_dim,
            scale=options.scale or (options.head_dim or local.head_dim) ** -0.5,
            window=options.window,
            dtype=dtype,
            limits=limits,
            is_batch_invariant=is_batch_invariant,
            soft_cap=options.soft_cap,
            has_sinks=options.has_sinks,
            is_causal=options.is_causal,
            sees_images=options.sees_images,
            has_own_kv=options.kv_layer is None,
            cache_head_dim=width // (options.num_kv_heads or local.num_kv_heads),
            choices=choices,
            values_from=local.values_from,
        )
        for options in (local.layer_attention[number] for number in local.attention_layers)
    )


def cached_shape(
    shape: ModelShape, device: Device, block_size: int, *, is_batch_invariant: bool
) -> ModelShape:
    """The shape of what a device caches: latent vectors, if a model has them and the attention
    backend that it gets takes them, else keys and values of each head."""
    if shape.values_from is None:
        return shape
    expanded = shape.expanded()

    def why_not(name: str, of: ModelShape) -> str:
        spec = AttentionSpec(
            of.num_heads,
            of.num_kv_heads,
            of.head_dim,
            1.0,
            None,
            device.formats.dtype,
            is_batch_invariant=is_batch_invariant,
            values_from=of.values_from,
        )
        return _why_not(_load(name), spec, device, block_size)

    for name in device.attentions:
        if not (reason := why_not(name, shape)):
            return shape
        if not why_not(name, expanded):
            logger.warning("keys and values of each head are cached with %s: %s", name, reason)
            return expanded
    return shape


class _Choice(NamedTuple):
    """The backend of a kind of layer; `sees_images` if it supports that, should the spec say it."""

    name: str
    makes: MakesAttention
    sees_images: bool


class StageAttention:
    """Makes the attention of a stage, which has one spec per layer, over a KV cache.

    `groups` are those of `attention_over`. Each kind of layer gets the first of the device's
    backends that supports it. Where the backend does not support that tokens of an image attend to
    each other, the plain one computes steps with images. Raises `StartupError` with the last one's
    reason if none supports a kind of layer.
    """

    def __init__(
        self,
        device: Device,
        specs: Sequence[AttentionSpec],
        block_size: int,
        groups: Sequence[int] = (),
    ) -> None:
        self._device = device
        self._specs = specs
        self._groups = groups
        self._chosen = {spec: _choose(device, spec, block_size) for spec in dict.fromkeys(specs)}
        self.names = "+".join(dict.fromkeys(choice.name for choice in self._chosen.values()))

    def over(self, cache: KVTensors) -> AttentionBackend:
        """The attention of all layers over the cache; several may exist at a time."""
        return attention_over(self._specs, cache, self._make, self._groups)

    def _make(self, spec: AttentionSpec, cache: KVTensors) -> AttentionBackend:
        choice = self._chosen[spec]
        if choice.sees_images or not spec.sees_images:
            return self._device.backend(choice.makes, spec, cache)
        usual = self._device.backend(choice.makes, replace(spec, sees_images=False), cache)
        plain = cast(MakesAttention, _load(PLAIN))
        return beside_images(usual, self._device.backend(plain, spec, cache))


def _load(name: str) -> object:
    return load_from_table("adapters.attention:BACKENDS", "attention", name)


def _why_not(makes: object, spec: AttentionSpec, device: Device, block_size: int) -> str:
    """Why a backend does not support a kind of layer, in one line; empty if it does."""
    why_not = getattr(makes, "why_not", None)
    return "" if why_not is None else str(why_not(spec, device.formats.kv_dtype, block_size))


def _choose(device: Device, spec: AttentionSpec, block_size: int) -> _Choice:
    """The first backend that supports a kind of layer."""
    *_, last = device.attentions
    without_images = replace(spec, sees_images=False)
    for name in device.attentions:
        makes = _load(name)
        reason = _why_not(makes, without_images, device, block_size)
        if not reason:
            sees_images = not _why_not(makes, spec, device, block_size)
            return _Choice(name, cast(MakesAttention, makes), sees_images)
        if name != last:
            logger.warning("attention %s cannot be used: %s", name, reason)
    raise StartupError(f"attention {last!r} cannot be used: {reason}")
