"""What vision transformers have in common: layers over the patches of one image, in tiles.

A layer's attention reads keys and values of all patches, and all else is row by row. So a slice
finishes a layer for the patches of a tile, and then computes what the next layer reads of them:

    slice    embed tile, q k v of layer 0 │ attention, MLP of layer 0, q k v of layer 1 │ …
             tile 0   tile 1   tile 2     │ tile 0      tile 1      tile 2               │ …
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from engine.media import EncoderReport
from engine.worker.ports import (
    EncoderPixels,
    EncoderState,
    Encoding,
    Linear,
    Norm,
    Operators,
    RopeAngles,
    TensorSlice,
    WeightSource,
)

FLOAT32_BYTES = 4
TILE = 64  # patches of a slice: 16 tokens, as the least piece of a prompt beside decodes


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """The sizes that all encoders have."""

    num_layers: int
    width: int
    inner: int
    num_heads: int
    out_width: int

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def reported(
        self, num_matrices: int, *, num_added: int = 0, merge: int = 0, is_whole: bool = False
    ) -> EncoderReport:
        """What the control plane knows of the encoder: an MLP has so many matrices, and the results
        of `num_added` layers are added behind layers of the decoder; the rest as in
        `EncoderReport`."""
        return EncoderReport(
            num_layers=self.num_layers,
            row_bytes=FLOAT32_BYTES * self.out_width * (1 + num_added),
            row_flops=2 * self.width * (4 * self.width + num_matrices * self.inner),
            pair_flops=4 * self.width,
            tile=TILE,
            merge=merge,
            is_whole=is_whole,
        )


class MixesPatches(Protocol):
    """A layer; `is_windowed` if its attention reads the window of a patch only."""

    @property
    def is_windowed(self) -> bool: ...

    def read(self, hidden: Tensor, qkv: Tensor) -> None:
        """Fill in `[patches, 3, heads, dim]`, but for RoPE, from `[patches, width]`."""

    def add(self, mixed: Tensor, hidden: Tensor) -> None:
        """Add to `hidden` what follows the attention's result, which is as wide."""


@dataclass(frozen=True, slots=True)
class VisionLayer:
    """Attention over all patches of an image, or of a window, and an MLP, each behind a norm."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear
    activation: Callable[[Tensor], Tensor]
    is_windowed: bool = False

    def read(self, hidden: Tensor, qkv: Tensor) -> None:
        qkv.copy_(self.qkv(self.attention_norm(hidden)).view(qkv.shape))

    def add(self, mixed: Tensor, hidden: Tensor) -> None:
        self.out(mixed, hidden)
        self.down(self.activation(self.up(self.mlp_norm(hidden))), hidden)


@dataclass(frozen=True, slots=True)
class VisionReader:
    """Reads norms and linears with biases; names begin with `root`."""

    weights: WeightSource
    operators: Operators
    root: str

    def linear(self, names: str | Sequence[str], outputs: int, inputs: int) -> Linear:
        """A linear of one tensor, or of several that read the same, with `outputs` each."""
        each = [names] if isinstance(names, str) else names
        weights = [
            self.weights.weight(TensorSlice(f"{self.root}{name}.weight", (outputs, inputs)))
            for name in each
        ]
        return self.operators.linear(weights, torch.cat([self.bias(n, outputs) for n in each]))

    def patches(self, name: str, size: tuple[int, ...], *, has_bias: bool = True) -> Linear:
        """The linear that embeds patches, stored as a convolution `[outputs, …]`."""
        kernel = self.tensor(f"{name}.weight", *size)
        bias = self.bias(name, size[0]) if has_bias else None
        return self.operators.linear([kernel.reshape(size[0], -1)], bias)

    def tensor(self, name: str, *size: int) -> Tensor:
        return self.weights.tensor(TensorSlice(f"{self.root}{name}", size))

    def bias(self, name: str, size: int) -> Tensor:
        return self.tensor(f"{name}.bias", size)

    def norm(self, name: str, size: int, eps: float) -> Norm:
        weight = self.tensor(f"{name}.weight", size)
        return self.operators.layer_norm(weight, self.bias(name, size), eps)

    def rms_norm(self, name: str, size: int, eps: float) -> Norm:
        return self.operators.rms_norm(self.tensor(f"{name}.weight", size), eps)


class VisionTransformer(ABC):
    """An `ImageEncoder`; subclasses embed patches, and make tokens of them."""

    def __init__(
        self,
        operators: Operators,
        layers: Sequence[MixesPatches],
        num_heads: int,
    ) -> None:
        self._operators = operators
        self._layers = layers
        self._num_heads = num_heads

    @property
    @abstractmethod
    def smallest(self) -> tuple[tuple[int, ...], tuple[int, int, int]]: ...

    @abstractmethod
    def begin(self, pixels: EncoderPixels, grid: tuple[int, int, int]) -> EncoderState: ...

    @abstractmethod
    def embed(self, state: EncoderState, rows: slice) -> Tensor:
        """`[rows, width]` of patches, with their positions."""
        ...

    @abstractmethod
    def end(self, state: EncoderState) -> Encoding: ...

    @abstractmethod
    def finished(self, state: EncoderState, layer: int, rows: slice) -> None:
        """The layer is complete for these patches, of which tokens may be made."""
        ...

    def state(
        self,
        pixels: EncoderPixels,
        grid: tuple[int, int, int],
        width: int,
        angles: RopeAngles | None,
    ) -> EncoderState:
        """The state before the first slice."""
        count = grid[0] * grid[1] * grid[2]
        qkv = pixels.values.new_empty((count, 3, self._num_heads, width // self._num_heads))
        hidden = pixels.values.new_empty((count, width))
        return EncoderState(pixels, grid, hidden, qkv, torch.empty_like(qkv), angles)

    def run_slice(self, state: EncoderState, number: int) -> None:
        count = len(state.hidden)
        behind, tile = divmod(number, -(-count // TILE))  # so many layers lie behind it
        rows = slice(tile * TILE, min((tile + 1) * TILE, count))
        if tile == 0:
            state.qkv, state.next_qkv = state.next_qkv, state.qkv
        if behind == 0:
            state.hidden[rows] = self.embed(state, rows)
        else:
            self._finish(self._layers[behind - 1], state, rows)
            self.finished(state, behind - 1, rows)
        if behind < len(self._layers):
            self._read(self._layers[behind], state, rows)

    def _finish(self, layer: MixesPatches, state: EncoderState, rows: slice) -> None:
        """Attention and MLP of these patches, in place."""
        hidden = state.hidden[rows]
        q, k, v = state.qkv.unbind(1)
        if layer.is_windowed:
            seen = _window_parts(rows, state.window_ends)
            mixed = torch.cat(
                [self._operators.attend(q[part], k[window], v[window]) for part, window in seen]
            )
        else:
            mixed = self._operators.attend(q[rows], k, v)
        layer.add(mixed.reshape(len(hidden), -1), hidden)

    def _read(self, layer: MixesPatches, state: EncoderState, rows: slice) -> None:
        """What the layer's attention reads of these patches."""
        qkv = state.next_qkv[rows]
        layer.read(state.hidden[rows], qkv)
        if state.angles is not None:
            cos, sin = state.angles.cos[rows], state.angles.sin[rows]
            for heads in (qkv[:, 0], qkv[:, 1]):
                self._operators.apply_rope_(heads, cos, sin)


def places(height: int, width: int, block: int = 1) -> tuple[Tensor, Tensor]:
    """The row and the column of each patch; those of a square of `block` × `block` patches one
    after the other."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    sizes = (height // block, block, width // block, block)
    return (
        rows.reshape(sizes).transpose(1, 2).flatten(),
        columns.reshape(sizes).transpose(1, 2).flatten(),
    )


def angles_of(places: Sequence[Tensor], inverse: Tensor) -> RopeAngles:
    """RoPE whose dimensions are turned by one place after the other."""
    both = torch.stack(list(places), dim=1).to(inverse.device)
    angles = (both[:, :, None].float() * inverse).flatten(1)
    return RopeAngles(angles.cos(), angles.sin())


def _window_parts(rows: slice, ends: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """The parts of rows that are in one window each, with all rows of that window."""
    for start, stop in pairwise((0, *ends)):
        if start < rows.stop and rows.start < stop:
            yield slice(max(start, rows.start), min(stop, rows.stop)), slice(start, stop)
