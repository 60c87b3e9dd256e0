"""What each kernel of this package computes, in plain torch on any device.

Tests compare the kernels with these functions, workers verify the kernels against them at start,
and use them where a kernel cannot be compiled.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.worker.model.torch_operators import ACTIVATIONS

FP8 = torch.float8_e4m3fn
LN_2 = 0.6931471805599453
# The largest value of each 8-bit dtype; larger ones are clamped
LARGEST = {torch.int8: 127.0, FP8: 448.0}
CHUNK = 128  # inputs whose 4-bit codes lie together
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of MXFP4 without their sign, by code


class QuantizedRows(NamedTuple):
    """Rows in 8 bits, `values[i] * scales[i]`."""

    values: Tensor  # int8 or fp8 [rows, width]
    scales: Tensor  # float32 [rows, 1]


class FourBitWeight(NamedTuple):
    """A matrix `[out, in]` of 4-bit codes, `scale * number + offset` in each group of inputs.

    A code of integers stands for the number code - 8; one of MXFP4, whose scales are exponents,
    for ±`E2M1`. In a chunk of an output, word j has the codes of inputs 2j and 2j + 1 of the first
    32 in the lowest bits of its halves, then those of the next 32, and so on. Inputs are padded to
    whole chunks.
    """

    words: Tensor  # int32 [in / CHUNK, out, CHUNK / 8]
    scales: Tensor  # float16 [in / group, out]; uint8 of MXFP4, for 2 ** (scale - 127)
    offsets: Tensor | None  # float16, as the scales
    group: int  # inputs: 32, 64 or 128
    inputs: int

    @property
    def outputs(self) -> int:
        return self.words.shape[1]

    @property
    def is_e2m1(self) -> bool:
        return self.scales.dtype == torch.uint8


class RowBlocks(NamedTuple):
    """Rows sorted by expert, in blocks of one expert each.

    A block has the number of its expert, its first row, and the end of all rows of this expert,
    which is not beyond the first row if the block has no rows.
    """

    table: Tensor  # int32 [blocks, 3]
    num_experts: int


class CacheRows(NamedTuple):
    """The rows to which the keys and values of a step go: slot `slots[t]` of one layer's cache,
    whose heads of a token are adjacent, as are the tokens of a page. Where values are a part of the
    keys, nothing goes to `values`."""

    slots: Tensor  # int64 [tokens]
    keys: Tensor  # [pages, tokens of a page, kv heads, dim]
    values: Tensor  # the same, with the same strides
    k_scale: float = 1.0  # fp8 only: what the cache keeps is key / k_scale
    v_scale: float = 1.0


class DecodeKeys(NamedTuple):
    """The keys that decodes read, in runs of one row each."""

    runs: Tensor  # int32 [runs, 4]: row, place of its first page in `pages`, first token, end token
    pages: Tensor  # int32, the pages of all rows

    @staticmethod
    def row_of(number: int) -> tuple[int, bool]:
        """The row that a run names, and whether it has other runs: then it is `~row`."""
        return (~number, True) if number < 0 else (number, False)


class Scoring(NamedTuple):
    """How attention scores a key: `scale * q · key`, capped if there is a cap (Gemma 2)."""

    scale: float
    soft_cap: float | None = None
    k_scale: float = 1.0  # what the cache keeps is key / k_scale
    v_scale: float = 1.0


def attend_decodes(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    read: DecodeKeys,
    out: Tensor,
    parts: tuple[Tensor, Tensor],
    scoring: Scoring,
    sinks: Tensor | None = None,
) -> None:
    """Attention of q `[rows, heads, dim]` over runs of keys.

    Keys and values are pages `[pages, tokens of a page, kv heads, dim]`. A row with one run gets
    its attention in `out` `[rows, heads, dim]`, with `sinks` `[heads]`, scores of keys without a
    value. Each run of the others goes to `parts`, which `merge_runs` adds up: float32
    `[runs, heads, dim]`, attention over the run alone, and `[runs, heads]`, the logarithm to base 2
    of the sum of its exponentiated scores. Runs without tokens are not written.
    """
    size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    for number, (named, page, first, end) in enumerate(read.runs.tolist()):
        if first >= end:
            continue
        row, is_part = read.row_of(named)
        ids = read.pages[page : page - (-end // size)].long()
        k, v = (
            whole.view(torch.uint8)[ids].view(whole.dtype) if whole.dtype == FP8 else whole[ids]
            for whole in (keys, values)
        )
        k, v = (each.flatten(0, 1)[first:end].double() for each in (k, v))
        k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
        scores = torch.einsum("hd,khd->hk", q[row].double(), k) * scoring.scale * scoring.k_scale
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
        if is_part:
            parts[1][number] = torch.logsumexp(scores, dim=1) / LN_2
        elif sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), dim=1)
        shares = scores.softmax(dim=1)[:, : len(k)]
        found = torch.einsum("hk,khd->hd", shares, v) * scoring.v_scale
        if is_part:
            parts[0][number] = found.to(torch.float32)
        else:
            out[row] = found.to(out.dtype)


def merge_runs(
    found: Tensor, sums: Tensor, first: Tensor, out: Tensor, sinks: Tensor | None = None
) -> None:
    """`merge_parts` of the rows that have several parts; the others stay as they are."""
    for row, (start, end) in enumerate(pairwise(first.tolist())):
        if end - start > 1:
            here = torch.tensor([0, end - start])
            merge_parts(found[start:end], sums[start:end], here, out[row : row + 1], sinks)


def rope_and_cache_write(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    angles: tuple[Tensor, Tensor] | None,
    cache: CacheRows,
    q_out: Tensor | None = None,
) -> None:
    """Rotate q in place, or into `q_out`; write the rotated k, if any, and v, if any, to the
    cache. All `[tokens, heads, dim]`. Heads of `q_out` may have more dimensions, which get zeros:
    attention multiplies them by what lies behind a head, perhaps keys that an earlier request left.
    So keys are finite then: 0 for NaN, the largest number for infinity.

    `angles` are cosines and sines `[tokens, rotated / 2]`; the two halves of the first `rotated`
    dimensions are the pairs. None: nothing is rotated. k is rounded to its own dtype before it is
    converted to fp8.
    """
    turned = q if angles is None else _rotated(q, *angles)
    if q_out is not None:
        q_out.zero_()
        q_out[..., : q.shape[-1]] = turned
    elif angles is not None:
        q.copy_(turned)
    if k is None:
        return
    k = k if angles is None else _rotated(k, *angles)
    if q_out is not None and q_out.shape[-1] > k.shape[-1]:
        k = k.nan_to_num()
    size = cache.keys.shape[1]
    at = cache.slots // size, cache.slots % size
    for rows, pages, scale in ((k, cache.keys, cache.k_scale), (v, cache.values, cache.v_scale)):
        if rows is None:
            continue
        if pages.dtype == FP8:
            pages.view(torch.uint8)[at] = fp8_of(rows, scale).view(torch.uint8)
        else:
            pages[at] = rows


def fp8_of(rows: Tensor, scale: float) -> Tensor:
    """`rows / scale` rounded to the nearest e4m3 value; what is beyond the largest becomes it."""
    most = LARGEST[FP8]
    return (rows.float() * (1 / scale)).clamp(-most, most).to(FP8)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """RMS norm over the last dimension into `out`, which may be `x`; rounded once."""
    out.copy_(F.rms_norm(x, weight.shape, weight, eps))


def gated(name: str, x: Tensor, out: Tensor) -> None:
    """`activation(left half of x) * right half`; the product is rounded once."""
    left, right = x.float().chunk(2, dim=-1)
    out.copy_(ACTIVATIONS[name](left) * right)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """Rows `[rows, width]` in int8 or fp8, one scale per row; a row of zeros has scale 1."""
    values, most = x.float(), LARGEST[dtype]
    largest = values.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / most, 1.0)
    steps = (values / scales).clamp_(-most, most)
    return QuantizedRows((steps.round_() if dtype == torch.int8 else steps).to(dtype), scales)


def norm_and_quantize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> QuantizedRows:
    """`quantize_rows` of the RMS norm, which is rounded to the dtype of `x` in between."""
    normed = torch.empty_like(x)
    rms_norm(x, weight, eps, normed)
    return quantize_rows(normed, dtype)


def gate_and_quantize(name: str, x: Tensor, dtype: torch.dtype) -> QuantizedRows:
    """`quantize_rows` of the gated activation, which is rounded to the dtype of `x` in between."""
    products = x.new_empty((len(x), x.shape[1] // 2))
    gated(name, x, products)
    return quantize_rows(products, dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[1]
    sizes = [half, half, heads.shape[-1] - 2 * half]
    first, second, rest = torch.split(heads.float(), sizes, dim=-1)
    cos, sin = cos[:, None].float(), sin[:, None].float()
    pairs = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*pairs, rest), dim=-1).to(heads.dtype)


def pack(codes: Tensor) -> Tensor:
    """The words of codes, uint8 `[out, in]` with whole chunks of inputs."""
    places = codes.to(torch.int32).view(len(codes), -1, 4, CHUNK // 8, 2) << _shifts(codes)
    return places.sum(dim=(2, 4), dtype=torch.int32).transpose(0, 1)


def unpack(weight: FourBitWeight, outputs: slice, dtype: torch.dtype) -> Tensor:
    """Some outputs of a weight, `[outputs, inputs]`; rounded once."""
    words = weight.words[:, outputs].transpose(0, 1)[:, :, None, :, None]
    codes = ((words >> _shifts(words)) & 15).flatten(2)
    numbers, scales = codes.float() - 8, weight.scales[:, outputs].t().float()
    if weight.is_e2m1:
        table = torch.tensor([*E2M1, *(-each for each in E2M1)], device=words.device)
        numbers, scales = table[codes.long()], torch.exp2(scales - 127)
    found = numbers.reshape(len(codes), -1, weight.group) * scales[:, :, None]
    if weight.offsets is not None:
        found += weight.offsets[:, outputs].t().float()[:, :, None]
    return found.flatten(1)[:, : weight.inputs].to(dtype)


def _shifts(beside: Tensor) -> Tensor:
    """The place of each code of a chunk in its word, `[4, 1, 2]`."""
    places, halves = (torch.arange(count, device=beside.device) for count in (4, 2))
    return (4 * places[:, None, None] + 16 * halves).to(torch.int32)


def product(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    scales: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T` in float64, times the scales `[rows, 1]` and `[out, 1]`, plus bias and
    `add_to`; rounded once."""
    sums = x.double() @ weight.double().T
    if scales is not None:
        sums *= scales[0].double() * scales[1].double().view(1, -1)
    if bias is not None:
        sums += bias.double()
    if add_to is not None:
        sums += add_to.double()
    return sums.to(dtype)


def merge_parts(
    found: Tensor, sums: Tensor, first: Tensor, out: Tensor, sinks: Tensor | None = None
) -> None:
    """Into `out` `[rows, heads, dim]` attention over all keys of a row, from that over its parts.

    `found` `[parts, heads, dim]` are the parts' outputs, `sums` float32 `[parts, heads]` the
    logarithms to base 2 of the sums of their exponentiated scores; parts `first[row]` to
    `first[row + 1]` are those of a row. `sinks` `[heads]` are scores of keys without a value.
    """
    for row, (start, end) in enumerate(pairwise(first.tolist())):
        scores = sums[start:end].double() * LN_2
        if sinks is not None:
            scores = torch.cat((scores, sinks[None].double()))
        shares = scores.softmax(dim=0)[: end - start]
        out[row] = (shares[:, :, None] * found[start:end].double()).sum(dim=0).to(out.dtype)


def add_sinks(found: Tensor, sums: Tensor, first: Tensor, out: Tensor, sinks: Tensor) -> None:
    """`merge_parts` of rows that have one part each, which the host does not wait for."""
    more = torch.sub(sinks, sums, alpha=LN_2).exp_().add_(1.0)
    out.copy_(found / more[:, :, None])
