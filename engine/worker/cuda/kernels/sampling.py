"""Temperature, min-p, top-k, top-p and the sampled id of each row, in one launch.

One program per row. Filters keep the largest weights, which are few in the rows of a trained model.
So a pass over the row counts and adds up the weights from three cuts on, and the next one copies
those above the highest cut that suffice; all else is done with these, if they are `MAX_LARGE` at
most, else with the row. A threshold is found without sorting: the bit patterns of non-negative
floats are ordered as they are, and each pass fixes two of the 30 bits of the threshold, by the
number (top-k) or the mass (top-p) of the weights above three candidates, until all weights that it
may still be are equal: 4 to 13 of 15 passes over 128,256 normal logits of deviation 3. Masses are
summed in float64 in a fixed order, so that a row's id depends on its logits, parameters and point
only. The definition is `engine.worker.sampling.filters`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # ids per iteration of a pass
NUM_WARPS = 16
FIRST_SHIFT = tl.constexpr(28)  # weights are at most 1.0, whose highest set bit is 29
MAX_PASSES = tl.constexpr(15)
MAX_LARGE = 8192  # weights of a row that are copied; for normal logits, no time was measured
HIGH, MIDDLE, LOW = tl.constexpr(2.0**-6), tl.constexpr(2.0**-12), tl.constexpr(2.0**-20)


@triton.jit
def _largest_threshold(weights, vocab, floor, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest threshold such that the weights at or above it suffice: their
    number, or their mass, is at least `wanted`; and the number of passes over the row. Weights
    whose bits are below `floor` count as 0."""
    found = floor * 0
    passes = floor * 0
    is_found = floor < 0
    kind: tl.constexpr = tl.float64 if BY_MASS else tl.int32
    while (passes < MAX_PASSES) & (is_found == 0):
        shift = FIRST_SHIFT - 2 * passes
        one, two, three = found + (1 << shift), found + (2 << shift), found + (3 << shift)
        at_one = tl.zeros([BLOCK], kind)
        at_two = tl.zeros([BLOCK], kind)
        at_three = tl.zeros([BLOCK], kind)
        # The range of bits that the threshold may have
        least = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        most = tl.full([BLOCK], -1, tl.int32)
        for start in range(0, vocab, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            weight = tl.load(weights + ids, mask=ids < vocab, other=0.0)
            bits = weight.to(tl.int32, bitcast=True)
            amount = weight.to(tl.float64) if BY_MASS else bits * 0 + 1
            counts = (ids < vocab) & (bits >= floor)
            amount = tl.where(counts, amount, 0)
            at_one += tl.where(bits >= one, amount, 0)
            at_two += tl.where(bits >= two, amount, 0)
            at_three += tl.where(bits >= three, amount, 0)
            is_possible = counts & (bits >= found) & (bits - found < 4 << shift)
            least = tl.minimum(least, tl.where(is_possible, bits, 0x7FFFFFFF))
            most = tl.maximum(most, tl.where(is_possible, bits, -1))
        digit = (tl.sum(at_one, axis=0) >= wanted).to(tl.int32)
        digit += (tl.sum(at_two, axis=0) >= wanted).to(tl.int32)
        digit += (tl.sum(at_three, axis=0) >= wanted).to(tl.int32)
        only = tl.min(least, axis=0)
        is_found = only == tl.max(most, axis=0)
        found = tl.where(is_found, only, found + (digit << shift))
        passes += 1
    return found, passes


@triton.jit
def _store_weights(
    logits, weights, temperature, min_p, vocab, HAS_FILTERS: tl.constexpr, BLOCK: tl.constexpr
):
    """Unnormalised probabilities, the largest is 1; those below min-p are 0. With filters also the
    masses of all and from each cut on, and how many these are."""
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        most = tl.maximum(most, logit)
    largest = tl.max(most, axis=0)
    mass = tl.zeros([BLOCK], tl.float64)
    high, middle, low = mass, mass, mass
    at_high = tl.zeros([BLOCK], tl.int32)
    at_middle, at_low = at_high, at_high
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logit = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
        weight = tl.exp(tl.div_rn(logit - largest, temperature))
        weight = tl.where((weight < min_p) | (ids >= vocab), 0.0, weight)
        tl.store(weights + ids, weight, mask=ids < vocab)
        if HAS_FILTERS:
            amount = weight.to(tl.float64)
            mass += amount
            high += tl.where(weight >= HIGH, amount, 0.0)
            middle += tl.where(weight >= MIDDLE, amount, 0.0)
            low += tl.where(weight >= LOW, amount, 0.0)
            at_high += (weight >= HIGH).to(tl.int32)
            at_middle += (weight >= MIDDLE).to(tl.int32)
            at_low += (weight >= LOW).to(tl.int32)
    masses = tl.sum(mass, axis=0), tl.sum(high, axis=0), tl.sum(middle, axis=0), tl.sum(low, axis=0)
    return masses, (tl.sum(at_high, axis=0), tl.sum(at_middle, axis=0), tl.sum(at_low, axis=0))


@triton.jit
def _cut(has_limit, limit, share, masses, counts):
    """The highest cut such that the weights from it on suffice for top-k, else for top-p, and how
    many they are; 2.0 if none does."""
    wanted = share * masses[0]
    does_high = tl.where(has_limit, counts[0] >= limit, masses[1] >= wanted)
    does_middle = tl.where(has_limit, counts[1] >= limit, masses[2] >= wanted)
    does_low = tl.where(has_limit, counts[2] >= limit, masses[3] >= wanted)
    cut = tl.where(does_high, HIGH, tl.where(does_middle, MIDDLE, tl.where(does_low, LOW, 2.0)))
    count = tl.where(does_high, counts[0], tl.where(does_middle, counts[1], counts[2]))
    return cut, count


@triton.jit
def _copy_large(weights, vocab, cut, large, places, BLOCK: tl.constexpr):
    """The weights from the cut on, and their ids, in the order of these."""
    count = vocab * 0
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < vocab, other=0.0)
        is_large = weight >= cut
        place = count + tl.cumsum(is_large.to(tl.int32), axis=0) - 1
        tl.store(large + place, weight, mask=is_large)
        tl.store(places + place, ids, mask=is_large)
        count += tl.sum(is_large.to(tl.int32), axis=0)


@triton.jit
def _mass_and_ties(weights, vocab, border, BLOCK: tl.constexpr):
    """The mass of the weights above the border, the number of those equal to it, and what one of
    them is."""
    above = tl.zeros([BLOCK], tl.float64)
    ties = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < vocab, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        above += tl.where(bits > border, weight, 0.0).to(tl.float64)
        ties += ((bits == border) & (ids < vocab)).to(tl.int32)
    each = border.to(tl.float32, bitcast=True).to(tl.float64)
    return tl.sum(above, axis=0), tl.sum(ties, axis=0), each


@triton.jit
def _id_at(weights, vocab, border, num_kept, num_ties, target, BLOCK: tl.constexpr):
    """The first id at which the mass of the kept weights passes `target`; of the `num_ties`
    weights equal to the border the `num_kept` with the lowest ids are kept."""
    before = target * 0  # mass of the kept weights of earlier blocks
    ties_before = num_ties * 0
    found = vocab
    last = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + ids, mask=ids < vocab, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        is_kept = (bits >= border) & (weight > 0)
        if num_kept < num_ties:
            tie = (bits == border).to(tl.int32)
            rank = ties_before + tl.cumsum(tie, axis=0) - tie
            is_kept = is_kept & ((tie == 0) | (rank < num_kept))
            ties_before += tl.sum(tie, axis=0)
        last = tl.maximum(last, tl.where(is_kept, ids, 0))
        amount = tl.where(is_kept, weight, 0.0).to(tl.float64)
        after = before + tl.sum(amount, axis=0)
        if (found == vocab) & (after > target):
            passed = before + tl.cumsum(amount, axis=0) > target
            first = tl.min(tl.where(passed & is_kept, ids, vocab), axis=0)
            rounded = tl.max(tl.where(is_kept, ids, 0), axis=0)  # the two sums may differ
            found = tl.where(first < vocab, first, rounded)
        before = after
    return tl.where(found < vocab, found, tl.max(last, axis=0))


@triton.jit
def kernel(
    logits,
    weights,
    large,
    places,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    points,
    sampled,
    vocab,
    row_stride,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: rows. `weights` `[rows, vocab]` float32, `large` `[rows, MAX_LARGE]` and `places`, the
    same in int32, are scratch memory."""
    row = tl.program_id(0).to(tl.int64)
    weights, large, places = weights + row * vocab, large + row * MAX, places + row * MAX
    temperature, min_p = tl.load(temperatures + row), tl.load(min_ps + row)
    HAS_FILTERS: tl.constexpr = HAS_TOP_K or HAS_TOP_P
    masses, counts = _store_weights(
        logits + row * row_stride, weights, temperature, min_p, vocab, HAS_FILTERS, BLOCK
    )
    tl.debug_barrier()  # other threads read these weights
    top_k = tl.load(top_ks + row).to(tl.int32) if HAS_TOP_K else vocab
    top_p = tl.load(top_ps + row) if HAS_TOP_P else masses[0] * 0 + 1.0
    source, size, is_copied = weights, vocab, vocab < 0
    if HAS_FILTERS:
        cut, count = _cut(top_k < vocab, top_k, top_p, masses, counts)
        is_copied = (cut < 2.0) & (count <= MAX) & ((top_k < vocab) | (top_p < 1.0))
        if is_copied:
            _copy_large(weights, vocab, cut, large, places, BLOCK)
            tl.debug_barrier()
        source = tl.where(is_copied, large, weights)
        size = tl.where(is_copied, count, vocab)
    border = vocab * 0  # bits of the smallest kept weight
    if HAS_TOP_K:
        has_limit = top_k < vocab
        if has_limit:
            border, _ = _largest_threshold(source, size, border, top_k, False, BLOCK)
    mass, num_ties, each = _mass_and_ties(source, size, border, BLOCK)
    num_kept = num_ties
    if HAS_TOP_P:
        wanted = tl.where(top_k < vocab, mass + num_ties.to(tl.float64) * each, masses[0])
        if top_p < 1.0:
            wanted *= top_p
            border, _ = _largest_threshold(source, size, border, wanted, True, BLOCK)
            border = tl.minimum(border, 0x3F800000)  # 1.0, the largest weight
            mass, num_ties, each = _mass_and_ties(source, size, border, BLOCK)
            missing = tl.ceil((wanted - mass) / tl.maximum(each, 1e-300))
            missing = tl.minimum(tl.maximum(missing, 1.0), num_ties.to(tl.float64))
            num_kept = missing.to(tl.int32)
    target = tl.load(points + row) * (mass + num_kept.to(tl.float64) * each)
    found = _id_at(source, size, border, num_kept, num_ties, target, BLOCK)
    if is_copied:
        found = tl.load(places + found)
    tl.store(sampled + row, found.to(tl.int64))


def sample(
    logits: Tensor,
    temperatures: Tensor,
    min_ps: Tensor,
    top_ks: Tensor | None,
    top_ps: Tensor | None,
    points: Tensor,
) -> Tensor:
    """An id for each row of `[rows, vocab]` float32; any id if a row has no finite maximum.

    Parameters are `[rows]`: temperatures and min_ps float32, top_ks int64 (the vocabulary's size
    where there is no limit), top_ps and points float64. None: no row has that filter.
    """
    rows, vocab = logits.shape
    sampled = torch.empty(rows, dtype=torch.int64, device=logits.device)
    copied = (rows, min(MAX_LARGE, vocab))
    kernel[(rows,)](
        logits,
        torch.empty_like(logits, memory_format=torch.contiguous_format),
        torch.empty(copied, dtype=torch.float32, device=logits.device),
        torch.empty(copied, dtype=torch.int32, device=logits.device),
        temperatures,
        min_ps,
        points if top_ks is None else top_ks,
        points if top_ps is None else top_ps,
        points,
        sampled,
        vocab,
        logits.stride(0),
        HAS_TOP_K=top_ks is not None,
        HAS_TOP_P=top_ps is not None,
        MAX=copied[1],
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        num_warps=NUM_WARPS,
    )
    return sampled
