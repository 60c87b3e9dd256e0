"""Linear layers on a GPU whose weights stay in 4 bits, from most formats that have 4-bit codes.

Up to 256 rows one kernel reads the codes, and decodes them again for each 64 rows. For more rows
the weight is unpacked to 16 bits once and multiplied as floats: 0.5 bytes per weight are read and 2
written, by our estimate a tenth of the product's time at 2,048 rows, and no second kernel has to be
as good as torch's. Without our kernel torch unpacks too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.reference import CHUNK, FourBitWeight
from engine.worker.cuda.kernels.tiling import FIXED_4_BIT, four_bit_tiling
from engine.worker.cuda.model.linears import PLAIN, FastProducts, FloatLinear, device_of
from engine.worker.ports import Weight
from engine.worker.weights.formats import LAYOUTS
from engine.worker.weights.formats.grouped import GroupedWeight, scales_and_offsets
from engine.worker.weights.formats.int4 import GROUP, MIDDLE, quantize
from engine.worker.weights.formats.mxfp4 import MXFP4

# What the kernels decode: groups of 32 inputs or more, of integers or of MXFP4
FORMATS_IN_4_BITS = frozenset(
    name
    for name, layout in LAYOUTS.items()
    if layout.bits == 4 and layout.group >= GROUP and layout.codes in ((), MXFP4.codes)
)
HALVES = (torch.bfloat16, torch.float16)  # what the kernels multiply with
ELEMENTS_AT_ONCE = 1 << 24  # so many are packed together
MAX_UNPACKED_BYTES = 256 << 20  # so many are unpacked at a time


@dataclass(frozen=True, slots=True)
class FourBitLinear:
    """A weight in 4 bits; activations stay in 16 bits."""

    weight: FourBitWeight
    bias: Tensor | None
    fast: FastProducts = PLAIN

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        fast, outputs = self.fast, self.weight.outputs
        tiling = FIXED_4_BIT if fast.is_batch_invariant else four_bit_tiling(len(x), outputs)
        if fast.four_bit is not None and tiling is not None and x.dtype in HALVES:
            after = fast.four_bit.Epilogue(bias=self.bias, add_to=add_to)
            found: Tensor = fast.four_bit.product(x, self.weight, tiling, after)
            return found
        parts = []
        count = max(1, MAX_UNPACKED_BYTES // (self.weight.inputs * x.itemsize))
        for at in range(0, outputs, count):
            here = slice(at, min(at + count, outputs))
            bias = None if self.bias is None else self.bias[here]
            linear = FloatLinear(self._unpacked(here, x.dtype), bias, fast)
            parts.append(linear(x, None if add_to is None else add_to[:, here]))
        if add_to is not None:
            return add_to
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _unpacked(self, outputs: slice, dtype: torch.dtype) -> Tensor:
        kernels = self.fast.four_bit if dtype in HALVES else None
        found: Tensor = (kernels or reference).unpack(self.weight, outputs, dtype)
        return found


def four_bit_linear(
    weights: Sequence[Weight], bias: Tensor | None, dtype: torch.dtype, fast: FastProducts = PLAIN
) -> FourBitLinear:
    """A linear of weights with 4-bit codes; others are quantized as `--weights int4` on a CPU."""
    return FourBitLinear(packed(weights), bias, fast)


def are_in_4_bits(weights: Sequence[Weight]) -> bool:
    """Whether all have 4-bit codes, of integers or of MXFP4, so that they can be one weight."""
    layouts = [each.layout for each in weights if isinstance(each, GroupedWeight)]
    names = {layout.name for layout in layouts}
    is_one_kind = len({layout.codes for layout in layouts}) == 1
    return len(layouts) == len(weights) and names <= FORMATS_IN_4_BITS and is_one_kind


def packed(weights: Sequence[Weight]) -> FourBitWeight:
    """The weights stacked along the output dimension, as the kernels read them.

    Groups of several sizes become groups of the smallest. Scales, and offsets, in which minimums
    and zero points are, are rounded to float16.
    """
    parts = weights if are_in_4_bits(weights) else [quantize(each) for each in weights]
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    place, inputs = device_of(parts[0]), parts[0].shape[1]
    outputs, chunks = sum(part.shape[0] for part in parts), -(-inputs // CHUNK)
    group = min(part.layout.group for part in grouped)
    is_e2m1 = bool(grouped[0].layout.codes)
    shape, kind = (chunks * CHUNK // group, outputs), torch.uint8 if is_e2m1 else torch.float16
    words = torch.empty((chunks, outputs, CHUNK // 8), dtype=torch.int32, device=place)
    scales = torch.zeros(shape, dtype=kind, device=place)
    has_offsets = any(part.layout.has_offsets for part in grouped)
    offsets = torch.zeros(shape, dtype=torch.float16, device=place) if has_offsets else None
    first = 0
    for part in _slices(grouped):
        here = slice(first, first + part.shape[0])
        first, groups, layout = here.stop, part.groups, part.layout
        words[:, here] = reference.pack(_cropped(groups.steps, chunks * CHUNK))
        own, shifts = scales_and_offsets(groups, layout)
        stored = torch.frexp(own).exponent + 127 if is_e2m1 else own  # `own` is half of the scale
        repeats = layout.group // group
        scales[:, here] = _cropped(stored.repeat_interleave(repeats, dim=1), len(scales)).t()
        if offsets is not None:
            shifts = own * (MIDDLE - layout.middle) + (0 if shifts is None else shifts)
            offsets[:, here] = _cropped(shifts.repeat_interleave(repeats, dim=1), len(scales)).t()
    return FourBitWeight(words, scales, offsets, group, inputs)


def _slices(weights: Sequence[GroupedWeight]) -> Iterator[GroupedWeight]:
    """Some outputs of a weight at a time, so that no whole matrix exists in integers."""
    for weight in weights:
        step = max(1, ELEMENTS_AT_ONCE // weight.inputs)
        for at in range(0, weight.shape[0], step):
            yield weight.rows(slice(at, at + step))


def _cropped(numbers: Tensor, width: int) -> Tensor:
    """So many columns: zeros are added, or padding is left out."""
    return F.pad(numbers, (0, width - numbers.shape[1]))
