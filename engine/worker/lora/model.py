"""A model with LoRA adapters (Hu et al., 2021): `y = W x + scale · B A x`, A and B of low rank.

Each linear of the blocks gets a `LoraLinear` around it, in a second tree of layers that shares all
weights with the first. Steps without rows of adapters run the first tree, so they cost the same as
without LoRA. In the others, a linear computes all rows as before, and then adds what each adapter
adds to its own rows. So the rows of a request have the same bits whatever else is in the step, but
for steps that a GPU has captured, in which the products between the factors are not rounded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TypeVar, cast

import numpy as np
from torch import Tensor

from engine.worker.lora.named_linears import LinearPart, NamedLinear, NamedLinears
from engine.worker.model.layers import Decoder
from engine.worker.ports import (
    NUM_LORA_SLOTS,
    HeadLinear,
    Int64s,
    Linear,
    LoraSegment,
    LowRank,
    SlottedLoras,
    StageModel,
    StepContext,
)

T = TypeVar("T")
NO_SLOT = -1


class StepSegments:
    """The rows of adapters in the step that is being computed."""

    def __init__(self) -> None:
        self.now: tuple[LoraSegment, ...] = ()
        self.slots: Tensor | None = None  # instead, the slot of each row


@dataclass(frozen=True, slots=True, eq=False)
class LoraLinear:
    """A linear, and what the adapters that are loaded add to it, by their ids."""

    linear: Linear
    parts: tuple[LinearPart, ...]
    segments: StepSegments
    loras: dict[int, LowRank]
    is_of_heads: bool = False
    slotted: SlottedLoras | None = None

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        y = self.linear(x, add_to)
        self.add(x, y)
        return y

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add to the results `y` of `x` what the adapters of the step's rows add."""
        if self.segments.slots is not None:
            assert self.slotted is not None, "such steps are of models whose linears have slots"
            self.slotted(x, y, self.segments.slots)
            return
        for lora_id, start, stop in self.segments.now:
            lora = self.loras.get(lora_id)
            if lora is not None:
                lora(x[start:stop], y[start:stop])


@dataclass(frozen=True, slots=True)
class HeadLowRank:
    """The `LowRank` of linears of heads: one for each."""

    heads: tuple[LowRank, ...]

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.heads)

    def __call__(self, x: Tensor, y: Tensor) -> None:
        for head, lora in enumerate(self.heads):
            lora(x[:, head], y[:, head])


@dataclass(frozen=True, slots=True, eq=False)
class LoraHeadLinear:
    """Linears of heads, and what the adapters that are loaded add to them."""

    linear: HeadLinear
    added: LoraLinear  # its `linear` is not used

    def __call__(self, x: Tensor, y: Tensor) -> None:
        self.linear(x, y)
        self.added.add(x, y)


class LoraModel:
    """A `StageModel` whose steps may have rows of LoRA adapters."""

    def __init__(
        self,
        base: StageModel,
        adapted: StageModel,
        linears: tuple[LoraLinear, ...],
        segments: StepSegments,
    ) -> None:
        """`base` and `adapted` share all weights; `linears` are those of `adapted`."""
        self.embed = base.embed
        self.features = base.features
        self.base = base
        self._ran_last = base  # the one of the two models that ran last
        self._adapted = adapted
        self._linears = linears
        self._segments = segments
        self._loaded: dict[int, int] = {}  # bytes, by id
        self._slots: dict[int, int] = {}
        self._free = list(range(NUM_LORA_SLOTS)) if self.has_slots else []

    @property
    def linears(self) -> tuple[LoraLinear, ...]:
        """The linears that adapters can change."""
        return self._linears

    @property
    def has_slots(self) -> bool:
        """Whether steps can be computed by the slots of their rows."""
        return bool(self._linears) and all(each.slotted is not None for each in self._linears)

    def slots(self, segments: Sequence[LoraSegment], num_rows: int) -> Int64s | None:
        """The slot of each row, negative for rows without an adapter; None if an adapter has no
        slot. Raises `ValueError` for an adapter that is not loaded."""
        self._check(segments)
        found = np.full(num_rows, NO_SLOT, dtype=np.int64)
        for lora_id, start, stop in segments:
            if lora_id not in self._slots:
                return None
            found[start:stop] = self._slots[lora_id]
        return found

    def add(self, lora_id: int, changes: Mapping[LoraLinear, LowRank]) -> int:
        """Load an adapter; it may be used in steps from now on. Returns its bytes."""
        for linear, change in changes.items():
            linear.loras[lora_id] = change
        if self._free:
            self._slots[lora_id] = slot = self._free.pop()
            for linear in self._linears:
                if linear.slotted is not None:
                    linear.slotted.put(slot, changes.get(linear))
        self._loaded[lora_id] = sum(change.num_bytes for change in changes.values())
        return self._loaded[lora_id]

    def remove(self, lora_id: int) -> None:
        """Unload an adapter, which no step in flight may use."""
        self._loaded.pop(lora_id, None)
        if (slot := self._slots.pop(lora_id, None)) is not None:
            self._free.append(slot)
        for linear in self._linears:
            linear.loras.pop(lora_id, None)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._ran_last.logits(hidden)  # it may have computed them with the layers

    def layers(self, hidden: Tensor, context: StepContext) -> Tensor:
        """Raises `ValueError` for rows of an adapter that is not loaded."""
        has_loras = bool(context.loras) or context.lora_slots is not None
        self._ran_last = self._adapted if has_loras else self.base
        if not has_loras:
            return self.base.layers(hidden, context)
        self._check(context.loras)
        self._segments.now, self._segments.slots = context.loras, context.lora_slots
        if context.rows is None:
            return self._adapted.layers(hidden, context)
        hidden = self._adapted.layers(hidden, replace(context, rows=None))
        return hidden.index_select(0, context.rows)

    def _check(self, segments: Sequence[LoraSegment]) -> None:
        for segment in segments:
            if segment.lora_id not in self._loaded:
                raise ValueError(f"LoRA adapter {segment.lora_id} is not loaded")


def no_slots(widths: Sequence[int]) -> None:
    """Steps with adapters are not captured."""


def with_loras(
    base: StageModel,
    built: StageModel,
    named: NamedLinears,
    recorded: Callable[[StageModel], StageModel],
    slotted: Callable[[Sequence[int]], SlottedLoras | None] = no_slots,
) -> LoraModel:
    """The model `base` with LoRA. `built` is as the family built it; `recorded` gives a model the
    form in which the device runs it, `slotted` the slots of a linear whose parts have these widths.
    A model that is not a `Decoder` has no linears for LoRA."""
    segments = StepSegments()
    linears: list[LoraLinear] = []

    def wrap(found: NamedLinear) -> LoraLinear | LoraHeadLinear:
        widths = [len(part.rows) for part in found.parts]
        slots = None if found.is_of_heads else slotted(widths)
        linear = cast(Linear, found.linear)
        added = LoraLinear(linear, found.parts, segments, {}, found.is_of_heads, slots)
        linears.append(added)
        return LoraHeadLinear(cast(HeadLinear, found.linear), added) if found.is_of_heads else added

    adapted = built
    if isinstance(built, Decoder):
        adapted = replace(built, blocks=_replaced(built.blocks, named, wrap))
    return LoraModel(base, recorded(adapted), tuple(linears), segments)


def linear_sizes(built: StageModel, named: NamedLinears) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each module in the blocks of a model, by name."""
    found = with_loras(built, built, named, lambda model: model).linears
    return {part.module: part.sizes for linear in found for part in linear.parts}


def _replaced(part: T, named: NamedLinears, wrap: Callable[[NamedLinear], object]) -> T:
    """A copy of a tree of frozen dataclasses and tuples in which all named linears are wrapped."""
    found = named.find(part)
    if found is not None:
        return cast(T, wrap(found))  # a linear for a linear
    if isinstance(part, tuple) and type(part) is tuple:
        copy = tuple(_replaced(each, named, wrap) for each in part)
        is_same = all(one is other for one, other in zip(copy, part, strict=True))
        return part if is_same else cast(T, copy)
    if is_dataclass(part) and not isinstance(part, type):
        changes = dict(_changes(part, named, wrap))
        return cast(T, replace(part, **changes)) if changes else part
    return part


def _changes(
    part: object, named: NamedLinears, wrap: Callable[[NamedLinear], object]
) -> Iterator[tuple[str, object]]:
    """The fields of a dataclass that have linears, with their new values."""
    assert is_dataclass(part), "checked by the caller"
    for field in fields(part):
        before = getattr(part, field.name)
        after = _replaced(before, named, wrap)
        if after is not before:
            yield field.name, after
