"""Safetensors of int4 weights, eight in an int32: compressed-tensors' `pack-quantized`, GPTQ, AWQ.

Each matrix is three tensors: packed steps of 0 to 15, scales of groups of inputs, and zero points,
packed too; a symmetric matrix may have none. Inputs ordered by activation (act-order) have a fourth
one, the group of each. Such a matrix, whose groups are no neighbours, becomes Q8_0.
"""

# mypy: disable-error-code="no-untyped-call"
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.worker.ports import PreferredFormat, Weight
from engine.worker.weights.checkpoint_files import SafetensorsFiles
from engine.worker.weights.formats.grouped import GroupLayout
from engine.worker.weights.formats.int4 import MIDDLE, SYMMETRIC, WITH_ZEROS, int4_weight
from engine.worker.weights.formats.llama_cpp import Q8_0, q8_0_weight

WEIGHT = ".weight"
PER_WORD = 8  # steps in an int32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word of AWQ has its outputs 0 to 7
GROUPS = tuple(sorted(SYMMETRIC, reverse=True))  # inputs


def _unpack(words: Tensor) -> Tensor:
    """The 4-bit numbers of int32 words from the lowest bits on, uint8 `[rows, 8 * words]`."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def _unpack_awq(words: Tensor) -> Tensor:
    by_word: Tensor = _unpack(words).unflatten(1, (-1, PER_WORD))
    return by_word[:, :, AWQ_ORDER].flatten(1).t()


class PackedScheme(NamedTuple):
    """How a kind of checkpoint names and packs the tensors of a matrix."""

    steps: str  # suffix of the packed steps
    scales: str
    zeros: str
    groups: str  # the group of each input; "" where no file has it
    others: tuple[str, ...]  # suffixes of tensors that are not needed
    is_transposed: bool  # scales are [groups, out]
    unpack: Callable[[Tensor], Tensor]  # steps to uint8 [out, in]
    unpack_zeros: Callable[[Tensor], Tensor]  # to uint8 [out, groups]


_GPTQ = PackedScheme(
    ".qweight",
    ".scales",
    ".qzeros",
    ".g_idx",
    (),
    is_transposed=True,
    unpack=lambda words: _unpack(words.t()),
    unpack_zeros=lambda words: _unpack(words).t(),
)
SCHEMES = {
    "pack-quantized": PackedScheme(
        ".weight_packed",
        ".weight_scale",
        ".weight_zero_point",
        ".weight_g_idx",
        (".weight_shape",),
        is_transposed=False,
        unpack=_unpack,
        unpack_zeros=lambda words: _unpack(words.t()).t(),
    ),
    # GPTQ's first format stores zero points minus 1.
    "gptq": _GPTQ._replace(unpack_zeros=lambda words: ((_unpack(words) + 1) & 15).t()),
    "gptq_v2": _GPTQ,
    "awq": _GPTQ._replace(groups="", unpack=_unpack_awq, unpack_zeros=_unpack_awq),
}


class _Matrix(NamedTuple):
    """What is known of a matrix before its steps are unpacked."""

    layout: GroupLayout
    shape: tuple[int, int]  # [out, in]
    scales: Tensor  # float16 [out, groups of the layout, or of the file]
    zeros: Tensor | None  # int8, as the scales
    group_of: Tensor | None  # int64 [in], of inputs ordered by activation


class Int4Files(SafetensorsFiles):
    """A directory of safetensors in which matrices may be packed int4."""

    def __init__(self, directory: Path, scheme_name: str) -> None:
        super().__init__(directory)
        self._scheme = scheme = SCHEMES[scheme_name]
        self._stems = {
            name.removesuffix(scheme.steps) + WEIGHT: name.removesuffix(scheme.steps)
            for name in self._shards
            if name.endswith(scheme.steps)
        }
        suffixes = (scheme.steps, scheme.scales, scheme.zeros, scheme.groups, *scheme.others)
        parts = {stem + suffix for stem in self._stems.values() for suffix in suffixes}
        self._names = (self._shards.keys() - parts) | self._stems.keys()
        self._last: tuple[str, _Matrix, Tensor] | None = None  # see `_unpacked`

    @property
    def preferred_format(self) -> PreferredFormat:
        """The stored format on devices that compute in groups, else int8."""
        layouts = {self._matrix(name).layout for name in self._stems}
        return PreferredFormat(
            "int8",
            stored=tuple(sorted(layout.name for layout in layouts)),
            floats=self.floats_of(self._names - self._stems.keys()),
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._matrix(name).shape if name in self._stems else super().shape(name)

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        """Packed rows; floats if the columns cut through a group."""
        if name not in self._stems:
            return super().read(name, index)
        (layout, (_, inputs), scales, zeros, group_of), steps = self._unpacked(name)
        if group_of is not None:
            own = group_of[index[1]]
            offsets = MIDDLE if zeros is None else zeros[index[0]][:, own]
            return q8_0_weight((steps[index].float() - offsets) * scales[index[0]][:, own])
        rows, columns = index[0], range(*index[1].indices(inputs))
        is_whole = columns.start % layout.group == 0 and (
            columns.stop % layout.group == 0 or columns.stop == inputs
        )
        wanted = columns if is_whole else range(inputs)
        groups = slice(wanted.start // layout.group, -(-wanted.stop // layout.group))
        steps = steps[rows, wanted.start : wanted.stop]
        steps = torch.nn.functional.pad(steps, (0, -len(wanted) % layout.group))
        weight = int4_weight(
            steps[:, ::2] | (steps[:, 1::2] << 4),
            scales[rows, groups],
            len(wanted),
            layout.group,
            None if zeros is None else zeros[rows, groups],
        )
        return weight if is_whole else weight.dequantize()[:, columns.start : columns.stop]

    def drop_pages(self) -> None:
        self._last = None
        super().drop_pages()

    def _unpacked(self, name: str) -> tuple[_Matrix, Tensor]:
        """A matrix, and its steps as uint8 `[out, in]`. The last one is kept, since the rows of
        each head are read on their own where keys and values have latent vectors."""
        if self._last is None or self._last[0] != name:
            self._last = None  # its memory is free for this one
            steps = self._scheme.unpack(self._tensor(name, self._scheme.steps))
            self._last = name, self._matrix(name), steps
        return self._last[1:]

    def _tensor(self, name: str, suffix: str) -> Tensor:
        """One of the tensors of a matrix; raises `StartupError` if the file lacks it."""
        own = self._stems[name] + suffix
        if own not in self._shards:
            raise StartupError(f"tensor {own} is missing from the checkpoint")
        return self.header(own)[(slice(None),)]

    def _matrix(self, name: str) -> _Matrix:
        """Raises `StartupError` if its groups or scales are not supported."""
        scheme = self._scheme
        scales = self._tensor(name, scheme.scales)
        if not scales.is_floating_point() or scales.dim() != 2:
            raise StartupError(f"{name}: {scheme.scales} is not a matrix of floats")
        scales = scales.t() if scheme.is_transposed else scales
        outputs, num_groups = scales.shape
        rows, columns = self.header(self._stems[name] + scheme.steps).get_shape()
        inputs = rows * columns * PER_WORD // outputs
        group = -(-inputs // num_groups)
        halves, zeros = scales.to(torch.float16), self._zeros(name, outputs)
        if not halves.isfinite().all():
            raise StartupError(f"{name} has scales that are not finite in float16")
        group_of = self._group_of(name, inputs, num_groups)
        if group_of is not None:
            return _Matrix(Q8_0, (outputs, inputs), halves, zeros, group_of)
        known = next((size for size in GROUPS if group % size == 0), GROUPS[-1])
        if group % known and num_groups > 1:
            raise StartupError(
                f"{name} has a scale for {group} inputs; supported: multiples of {GROUPS[-1]}, "
                "or one scale per output channel"
            )
        repeats, needed = -(-group // known), -(-inputs // known)
        layout = (SYMMETRIC if zeros is None else WITH_ZEROS)[known]
        return _Matrix(
            layout,
            (outputs, inputs),
            halves.repeat_interleave(repeats, dim=1)[:, :needed],
            None if zeros is None else zeros.repeat_interleave(repeats, dim=1)[:, :needed],
            None,
        )

    def _zeros(self, name: str, outputs: int) -> Tensor | None:
        """int8 `[out, groups]`; None if all of them are the middle."""
        if self._stems[name] + self._scheme.zeros not in self._shards:
            return None
        zeros = self._scheme.unpack_zeros(self._tensor(name, self._scheme.zeros))[:outputs]
        return None if (zeros == MIDDLE).all() else zeros.to(torch.int8)

    def _group_of(self, name: str, inputs: int, num_groups: int) -> Tensor | None:
        """The group of each input; None if groups are neighbours. Raises `StartupError`."""
        if self._stems[name] + self._scheme.groups not in self._shards:
            return None
        found = self._tensor(name, self._scheme.groups).long()
        usual = torch.arange(inputs) // -(-inputs // num_groups)
        if torch.equal(found, usual) or (found == -1).all():
            return None
        if found.shape != usual.shape or not ((found >= 0) & (found < num_groups)).all():
            raise StartupError(
                f"{name}: {self._scheme.groups} is not one of {num_groups} groups for each of "
                f"{inputs} inputs"
            )
        return found
