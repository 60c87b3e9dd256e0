"""Quantized tensors of GGUF files in the formats that the engine computes in as they are stored.

A row of a tensor is a run of blocks. Layouts of their bytes are those of `ggml-common.h` in
llama.cpp.
"""

# mypy: disable-error-code="no-untyped-call"
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.errors import StartupError
from engine.worker.weights.formats import llama_cpp, mxfp4
from engine.worker.weights.formats.grouped import GroupedWeight, GroupLayout, Groups

HALF = 2  # bytes of a float16
K_FACTORS = 12  # bytes of the 6-bit factors of a block in a K format


def stored_weight(rows: Tensor, kind: Kind, inputs: int) -> GroupedWeight:
    """A weight of rows of blocks, uint8 `[out, bytes]`; `kind` is a key of `FORMATS`."""
    layout, read = FORMATS[kind]
    tensors = MappingProxyType({"": rows})
    return GroupedWeight(layout, tensors, inputs, partial(_unpack, kind=kind, read=read))


def _unpack(
    tensors: Mapping[str, Tensor], *, kind: Kind, read: Callable[[Tensor], Groups]
) -> Groups:
    blocks = tensors[""].unflatten(1, (-1, GGML_QUANT_SIZES[kind][1]))
    found = (None if part is None else part.flatten(1) for part in read(blocks))
    return Groups(*found)  # type: ignore[arg-type]


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block."""
    return blocks[:, :, at : at + HALF].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """All low nibbles, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _bits(packed: Tensor) -> Tensor:
    """The bits of bytes from the lowest on, in a last dimension of 8 times the size."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & 1).flatten(-2)


def _4_bits(blocks: Tensor, *, has_minimum: bool) -> Groups:
    at = HALF * (1 + has_minimum)
    minimums = -_halves(blocks, HALF) if has_minimum else None
    return Groups(_nibbles(blocks[:, :, at:]), _halves(blocks, 0), minimums=minimums)


def _5_bits(blocks: Tensor, *, has_minimum: bool) -> Groups:
    at = HALF * (1 + has_minimum)
    high = _bits(blocks[:, :, at : at + 4]) << 4
    minimums = -_halves(blocks, HALF) if has_minimum else None
    return Groups(_nibbles(blocks[:, :, at + 4 :]) | high, _halves(blocks, 0), minimums=minimums)


def _8_bits(blocks: Tensor) -> Groups:
    return Groups(blocks[:, :, HALF:] ^ 128, _halves(blocks, 0))  # two's complement, plus 128


def _k_groups(blocks: Tensor, steps: Tensor) -> Groups:
    """The groups of Q4_K and Q5_K; the factors are 8 of scales and 8 of minimums in 6 bits."""
    packed = blocks[:, :, 2 * HALF : 2 * HALF + K_FACTORS]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factors = torch.cat((low & 63, (rest & 15) | ((low >> 6) << 4)), dim=-1)
    minimum_factors = torch.cat((high & 63, (rest >> 4) | ((high >> 6) << 4)), dim=-1)
    return Groups(
        steps,
        _halves(blocks, 0),
        factors.view(torch.int8),
        _halves(blocks, HALF),
        minimum_factors.view(torch.int8),
    )


def _q4_k(blocks: Tensor) -> Groups:
    pairs = blocks[:, :, 2 * HALF + K_FACTORS :].unflatten(2, (4, 32))  # two groups in 32 bytes
    return _k_groups(blocks, _nibbles(pairs).flatten(2))


def _q5_k(blocks: Tensor) -> Groups:
    rest = blocks[:, :, 2 * HALF + K_FACTORS :]
    steps = _nibbles(rest[:, :, 32:].unflatten(2, (4, 32))).unflatten(3, (2, 32)).flatten(2, 3)
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (rest[:, :, None, :32] >> groups) & 1  # input i of group g has bit g of byte i
    return _k_groups(blocks, (steps | (high << 4)).flatten(2))


def _q6_k(blocks: Tensor) -> Groups:
    """Each half of a block: 64 bytes with the low 4 bits of 128 inputs, 32 with the high 2."""
    low = blocks[:, :, :128].unflatten(2, (2, 64))
    high = blocks[:, :, 128:192].unflatten(2, (2, 1, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = ((high >> shifts) & 3).flatten(3)  # four runs of 32 inputs
    factors, scales = blocks[:, :, 192:208].contiguous().view(torch.int8), _halves(blocks, 208)
    return Groups((_nibbles(low) | (high << 4)).flatten(2), scales, factors)


def _mxfp4(blocks: Tensor) -> Groups:
    """An exponent and 16 bytes of codes."""
    exponents = blocks[:, :, 0]
    scales = mxfp4.halved_scales(exponents)
    if scales is None:
        least, most = exponents.aminmax()
        raise StartupError(
            f"MXFP4 weights have scales of 2 ** {int(least) - 127} to 2 ** {int(most) - 127}, "
            "which float16 lacks"
        )
    return Groups(_nibbles(blocks[:, :, 1:]), scales[:, :, None])


FORMATS: Mapping[Kind, tuple[GroupLayout, Callable[[Tensor], Groups]]] = MappingProxyType(
    {
        Kind.Q4_0: (llama_cpp.Q4_0, partial(_4_bits, has_minimum=False)),
        Kind.Q4_1: (llama_cpp.Q4_1, partial(_4_bits, has_minimum=True)),
        Kind.Q5_0: (llama_cpp.Q5_0, partial(_5_bits, has_minimum=False)),
        Kind.Q5_1: (llama_cpp.Q5_1, partial(_5_bits, has_minimum=True)),
        Kind.Q8_0: (llama_cpp.Q8_0, _8_bits),
        Kind.Q4_K: (llama_cpp.Q4_K, _q4_k),
        Kind.Q5_K: (llama_cpp.Q5_K, _q5_k),
        Kind.Q6_K: (llama_cpp.Q6_K, _q6_k),
        Kind.MXFP4: (mxfp4.MXFP4, _mxfp4),
    }
)
