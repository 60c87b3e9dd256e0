"""Chooses the attention backend of each kind of layer of a stage."""

import logging
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from engine.errors import StartupError
from engine.worker.device import Device
from engine.worker.model.mixed_attention import attention_over
from engine.worker.ports import (
    AttentionBackend,
    AttentionSpec,
    KVTensors,
    MakesAttention,
    ModelShape,
    StepLimits,
)
from engine.worker.weights.checkpoint import load_from_table

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
            has_own_kv=options.kv_layer is None,
            cache_head_dim=width // (options.num_kv_heads or local.num_kv_heads),
            choices=choices,
        )
        for options in (local.layer_attention[number] for number in local.attention_layers)
    )


class StageAttention:
    """Makes the attention of a stage, which has one spec per layer, over a KV cache.

    `groups` are those of `attention_over`. Each kind of layer gets the first of the device's
    backends that supports it. Raises `StartupError` with the last one's reason if none does.
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
        chosen = {spec: _choose(device, spec, block_size) for spec in dict.fromkeys(specs)}
        self._makes: Mapping[AttentionSpec, MakesAttention] = {
            spec: makes for spec, (_, makes) in chosen.items()
        }
        self.names = "+".join(dict.fromkeys(name for name, _ in chosen.values()))

    def over(self, cache: KVTensors) -> AttentionBackend:
        """The attention of all layers over the cache; several may exist at a time."""
        return attention_over(self._specs, cache, self._make, self._groups)

    def _make(self, spec: AttentionSpec, cache: KVTensors) -> AttentionBackend:
        return self._device.backend(self._makes[spec], spec, cache)


def _choose(device: Device, spec: AttentionSpec, block_size: int) -> tuple[str, MakesAttention]:
    """The first backend that supports a kind of layer, and its name."""
    *_, last = device.attentions
    for name in device.attentions:
        makes = load_from_table("adapters.attention:BACKENDS", "attention", name)
        why_not = getattr(makes, "why_not", None)
        reason = "" if why_not is None else why_not(spec, device.kv_dtype, block_size)
        if not reason:
            return name, cast(MakesAttention, makes)
        if name != last:
            logger.warning("attention %s cannot be used: %s", name, reason)
    raise StartupError(f"attention {last!r} cannot be used: {reason}")
