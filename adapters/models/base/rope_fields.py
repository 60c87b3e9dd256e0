"""Reads the RoPE of a layer kind from config.json: `rope_parameters`, or the older fields
`rope_theta`, `rope_scaling` and `partial_rotary_factor`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from adapters.models.base.fields import Fields
from engine.errors import StartupError
from engine.worker.model.rope import (
    GivenScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Scaling,
    YarnScaling,
    interleaved_axes,
    inverse_frequencies,
    longrope_magnitude,
    proportional_frequencies,
    sectioned_axes,
    yarn_magnitude,
)
from engine.worker.ports import ModelShape


@dataclass(frozen=True, slots=True)
class RopeSource:
    """RoPE as config.json describes it.

    LongRoPE (Phi-3) has other factors, `long`, if more than `original_positions` are served. As in
    vLLM and llama.cpp the served context length decides, not the length of each request, because
    keys in the cache must all have been rotated with the same frequencies.
    """

    dim: int  # rotated dimensions of a head
    theta: float
    scaling: Scaling | None = None
    magnitude: float = 1.0
    share: float = 1.0  # the share of frequencies that are not zero
    long: Scaling | None = None
    original_positions: int | None = None
    sections: tuple[int, ...] = ()  # frequencies of each axis of M-RoPE
    is_interleaved: bool = False  # the axes of M-RoPE

    def rope(self, served_positions: int) -> Rope:
        """The frequencies for a context of `served_positions` tokens."""
        return replace(self._rope(served_positions), axes=self._axes())

    def _axes(self) -> Tensor | None:
        """The axis of each frequency of M-RoPE."""
        if not self.sections:
            return None
        if self.is_interleaved:
            return interleaved_axes(self.sections, self.dim // 2)
        return sectioned_axes(self.sections)

    def _rope(self, served_positions: int) -> Rope:
        if self.share < 1.0:
            inverse = proportional_frequencies(self.dim, self.share, self.theta)
            return Rope(inverse if self.scaling is None else self.scaling(inverse))
        scaling = self.scaling
        if self.original_positions is not None and served_positions > self.original_positions:
            scaling = self.long
        return Rope(inverse_frequencies(self.dim, self.theta, scaling), self.magnitude)


class LayerRopes(NamedTuple):
    """The kinds of RoPE of a model and, for each layer, the index of its kind; None: no RoPE."""

    sources: tuple[RopeSource, ...]
    of_layer: tuple[int | None, ...]

    @classmethod
    def same(cls, source: RopeSource, num_layers: int) -> "LayerRopes":
        """One kind for all layers."""
        return cls((source,), (0,) * num_layers)


@dataclass(frozen=True, slots=True)
class RopeContext:
    """What the reader of a RoPE type needs beside its own fields."""

    config: Fields
    rope: Fields
    theta: float
    max_positions: int


def read_rope(
    config: Fields,
    head_dim: int,
    max_positions: int,
    *,
    rope: Fields | None = None,
    theta: float = 10000.0,
    share: float = 1.0,
) -> RopeSource:
    """The RoPE in `rope`, by default in the config's `rope_parameters` or `rope_scaling`.

    `theta` and `share` (of the head that is rotated) are used where config.json has neither.
    Raises `StartupError` for an unknown type or a missing field.
    """
    rope = rope or config.child("rope_parameters") or config.child("rope_scaling")
    rope = rope or Fields({}, "config.json: rope_parameters")
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", share))
    theta = rope.number("rope_theta", config.number("rope_theta", theta))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in READERS:
        raise StartupError(
            f"{rope.where}: rope type {kind!r} is not supported; known: {', '.join(READERS)}"
        )
    if not 0 < share <= 1:
        raise StartupError(f"{rope.where}: partial_rotary_factor={share} is not in (0, 1]")
    # GGUF files have the width instead of a share, which a product of floats can just miss
    width = head_dim if kind == "proportional" else int(head_dim * share + 1e-6)
    require_even(width, head_dim, rope.where)
    base = RopeSource(width, theta, share=share if kind == "proportional" else 1.0)
    return READERS[kind](base, RopeContext(config, rope, theta, max_positions))


def with_axes(source: RopeSource, rope: Fields) -> RopeSource:
    """The same RoPE with the three axes of `mrope_section`, if it has that."""
    if rope.get("mrope_section") is None:
        return source
    sections = rope.counts("mrope_section", 3)
    if sum(sections) != source.dim // 2:
        raise StartupError(
            f"{rope.where}: mrope_section={list(sections)} does not divide the {source.dim // 2} "
            "frequencies of RoPE"
        )
    is_interleaved = rope.flag("mrope_interleaved", False)
    return replace(source, sections=sections, is_interleaved=is_interleaved)


def require_even(width: int, head_dim: int, where: str) -> None:
    """Raise `StartupError` if RoPE cannot turn `width` dimensions of a head, which it pairs."""
    if not width or width % 2:
        raise StartupError(
            f"{where}: RoPE would turn {width} of the head's {head_dim} dimensions (head_dim * "
            "partial_rotary_factor); it turns them in pairs, so their number must be even and "
            "above 0"
        )


def ropes_by_type(
    config: Fields,
    shape: ModelShape,
    types: Sequence[str],
    thetas: Mapping[str, float],
    head_dims: Mapping[str, int] | None = None,
) -> LayerRopes:
    """One RoPE for each of a model's layer types; `types` has the type of each layer.

    They are in `rope_parameters`, an object for each type. Older configs have `rope_scaling`, which
    applies to layers with full attention only, and the bases `thetas`. `head_dims` are the head
    sizes of the types, where they differ.
    """
    nested, kinds = config.child("rope_parameters"), list(dict.fromkeys(types))
    sources = []
    for kind in kinds:
        rope = nested.child(kind) if nested else None
        if rope is None and kind == "full_attention":
            rope = config.child("rope_scaling")
        rope = rope or Fields({}, f"config.json: rope_parameters: {kind}")
        given = Fields({"rope_theta": thetas[kind], **rope.values}, rope.where)
        dim = shape.head_dim if head_dims is None else head_dims[kind]
        sources.append(read_rope(config, dim, shape.max_positions, rope=given))
    return LayerRopes(tuple(sources), tuple(kinds.index(each) for each in types))


def _default(base: RopeSource, context: RopeContext) -> RopeSource:
    return base


def _linear(base: RopeSource, context: RopeContext) -> RopeSource:
    return replace(base, scaling=LinearScaling(context.rope.number("factor")))


def _proportional(base: RopeSource, context: RopeContext) -> RopeSource:
    return replace(base, scaling=LinearScaling(context.rope.number("factor", 1.0)))


def _llama3(base: RopeSource, context: RopeContext) -> RopeSource:
    rope = context.rope
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.integer(
            "original_max_position_embeddings", context.max_positions
        ),
    )
    return replace(base, scaling=scaling)


def _factors(base: RopeSource, context: RopeContext) -> RopeSource:
    return replace(base, scaling=GivenScaling(context.rope.numbers("factors", base.dim // 2)))


def _yarn(base: RopeSource, context: RopeContext) -> RopeSource:
    rope = context.rope
    original = rope.integer("original_max_position_embeddings", context.max_positions)
    factor = rope.number("factor", context.max_positions / original)
    scaling = YarnScaling(
        factor=factor,
        theta=context.theta,
        original_max_positions=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        is_truncated=rope.flag("truncate", True),
    )
    magnitude = yarn_magnitude(factor)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        over, under = rope.number("mscale"), rope.number("mscale_all_dim")
        magnitude = yarn_magnitude(factor, over) / yarn_magnitude(factor, under)
    return replace(base, scaling=scaling, magnitude=rope.number("attention_factor", magnitude))


def _longrope(base: RopeSource, context: RopeContext) -> RopeSource:
    rope, config, count = context.rope, context.config, base.dim // 2
    name = "original_max_position_embeddings"
    original = rope.integer(name, config.integer(name, context.max_positions))
    factor = rope.number("factor", context.max_positions / original)
    return replace(
        base,
        scaling=GivenScaling(rope.numbers("short_factor", count)),
        long=GivenScaling(rope.numbers("long_factor", count)),
        original_positions=original,
        magnitude=rope.number("attention_factor", longrope_magnitude(factor, original)),
    )


READERS: dict[str, Callable[[RopeSource, RopeContext], RopeSource]] = {
    "default": _default,
    "mrope": _default,  # its sections are read by families with images
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # the older name, in Phi-3's first checkpoints
    "proportional": _proportional,
    "factors": _factors,  # GGUF files have it
}
