"""Weights of a checkpoint: parts of tensors by name, and the formats of linear weights.

A weight is a float tensor or a `QuantizedWeight`. Each quantized format is one file in
`engine.worker.weights.formats`; each device has a linear for the formats that it computes in and
dequantizes the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import Tensor


class QuantizedWeight(Protocol):
    """A matrix `[out, in]` in fewer bits than a float."""

    @property
    def format(self) -> str:
        """The name of its `LinearFormat`."""

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What it is stored as, by the suffix that each adds to the weight's name in a file."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same weight with each of its tensors replaced, for example by a copy on a GPU."""

    def rows(self, rows: slice) -> Self:
        """Some of its output rows."""

    def dequantize(self) -> Tensor:
        """The same matrix in float32, exactly."""


Weight: TypeAlias = Tensor | QuantizedWeight  # a linear's weight, [out, in]


@dataclass(frozen=True, slots=True)
class DeferredWeight:
    """A weight that is read only if the device does not have it packed.

    `skip` is called with its name if it is not read, `release` when what was read is packed.
    """

    part: "TensorSlice"
    read: Callable[["TensorSlice"], Weight]
    skip: Callable[[str], None]
    release: Callable[["TensorSlice"], None]

    @property
    def key(self) -> str:
        """Identifies the weight within its checkpoint."""
        return self.part.name + "".join(f"[{run.start}:{run.stop}]" for run in self.part.ranges)


LinearWeight: TypeAlias = Weight | DeferredWeight
Lookup: TypeAlias = Callable[[Tensor], Tensor]  # int64 [n] to [n, columns] in the worker's dtype


def loaded(weight: LinearWeight) -> Weight:
    """The weight, which is read now if it was deferred."""
    return weight.read(weight.part) if isinstance(weight, DeferredWeight) else weight


def dequantize(weight: LinearWeight) -> Tensor:
    """The weight as a float tensor."""
    weight = loaded(weight)
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def name_of(dtype: torch.dtype) -> str:
    """The name in settings and reports: "float32"."""
    return str(dtype).removeprefix("torch.")


def format_of(weight: Weight) -> str:
    """The name of a weight's format; for a float tensor, of its dtype."""
    return name_of(weight.dtype) if isinstance(weight, Tensor) else weight.format


def common_format(weights: Sequence[Weight]) -> str | None:
    """The format that all of these weights are in, None if they differ."""
    formats = {format_of(weight) for weight in weights}
    return formats.pop() if len(formats) == 1 else None


class LinearFormat(Protocol):
    """One format of linear weights, independent of the device that computes with it."""

    @property
    def name(self) -> str:
        """The name in the setting `weights`."""

    @property
    def bits(self) -> float:
        """Per matrix element, its share of the scales included."""

    def convert(self, weight: Weight) -> Weight:
        """The weight in this format; a weight that already has it is returned unchanged."""


class PreferredFormat(NamedTuple):
    """What a checkpoint is computed in when the settings `weights` and `kv_dtype` are "auto".

    `stored` are the formats of its quantized weights. The CPU leaves each weight as it is stored, a
    GPU those of 4 bits; it converts the others to `format`, a quantized format or None for floats,
    and all weights if none has 4 bits. `floats` is the dtype in which the checkpoint stores its
    floats, None if it is not one dtype. Without `keeps_kv` it is an encoder, whose keys and values
    last for a step: they need not be small.
    """

    format: str | None = None
    stored: tuple[str, ...] = ()
    floats: str | None = None
    keeps_kv: bool = True


class HeadTiles(NamedTuple):
    """An order of value heads: the first one of each key head, then the second ones, and so on.
    Else those of a key head lie together."""

    num_keys: int
    per_key: int

    def tiled(self, x: Tensor) -> Tensor:
        """Numbers of all value heads, along the last dimension, in this order."""
        heads = x.reshape(*x.shape[:-1], self.num_keys, self.per_key, -1)
        return heads.transpose(-3, -2).reshape(x.shape)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Some rows and columns of a tensor of the checkpoint.

    `shape` is that of the whole tensor; `rows` and `columns` select from its first and second
    dimension, None selects all. With `is_transposed` the file stores the transpose, while `shape`,
    `rows` and `columns` describe the tensor that is returned. `tiles` is the order in which the
    file has the columns, where it is not that of LoRA adapters. `as_floats`: quantized numbers are
    dequantized, as those of the transpose have to be.
    """

    name: str
    shape: tuple[int, ...]
    rows: range | None = None
    columns: range | None = None
    is_transposed: bool = False
    tiles: HeadTiles | None = None
    as_floats: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor in the file."""
        return self.shape[::-1] if self.is_transposed else self.shape

    @property
    def stored_index(self) -> tuple[slice, ...]:
        """What to index the stored tensor with."""
        index = tuple(slice(run.start, run.stop) for run in self.ranges)
        return index[::-1] if self.is_transposed else index

    @property
    def ranges(self) -> tuple[range, ...]:
        """The selected indices of each dimension."""
        selected = (self.rows, self.columns, *(None for _ in self.shape[2:]))
        return tuple(
            range(size) if run is None else run
            for size, run in zip(self.shape, selected, strict=False)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return tuple(len(run) for run in self.ranges)


class WeightSource(Protocol):
    """The tensors of a checkpoint by name."""

    def has(self, name: str) -> bool: ...

    def tensor(self, part: TensorSlice) -> Tensor:
        """The slice in the worker's dtype. Raises `StartupError` if missing or misshapen."""

    def weight(self, part: TensorSlice) -> LinearWeight:
        """The slice of a linear's weight `[out, in]`, which may be quantized, or read later.

        Raises `StartupError` if missing or misshapen.
        """

    def lookup(self, part: TensorSlice) -> Lookup:
        """Reads rows of a matrix, an embedding, by their indices.

        Raises `StartupError` if missing or misshapen.
        """

    def skip(self, name: str) -> None:
        """Count a tensor as loaded that came from elsewhere, such as the packed cache."""


class StoredWeights(WeightSource, Protocol):
    """A `WeightSource` before the device converts what it holds."""

    def stored(self, part: TensorSlice) -> Weight:
        """A linear's weight as `weight` has it, with floats in the dtype in which they are kept."""
