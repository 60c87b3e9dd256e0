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


def _choose(device: Device, spec: AttentionSpec, block_size: int) -> _Choice:
    """The first backend that supports a kind of layer."""
    *_, last = device.attentions
    without_images = replace(spec, sees_images=False)
    for name in device.attentions:
        makes = _load(name)
        why_not = getattr(makes, "why_not", None)
        reason = (
            "" if why_not is None else why_not(without_images, device.formats.kv_dtype, block_size)
        )
        if not reason:
            sees_images = why_not is None or not why_not(spec, device.formats.kv_dtype, block_size)
            return _Choice(name, cast(MakesAttention, makes), sees_images)
        if name != last:
            logger.warning("attention %s cannot be used: %s", name, reason)
    raise StartupError(f"attention {last!r} cannot be used: {reason}")
