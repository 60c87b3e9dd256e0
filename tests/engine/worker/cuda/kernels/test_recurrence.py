"""Kernels of recurrent layers under Triton's interpreter against plain torch."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from engine.step import NO_STATE, StateSlots
from engine.worker.ports import ConvShape, DeltaShape, MambaShape, MambaWeights, RecurrentShape
from tests.engine.worker.cpu.recurrences import Step, inputs_of
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.engine.worker.cuda.kernels.recurrent_steps import (
    DECODES,
    MIXED,
    num_rows,
    run,
    wanted,
    weights_of,
)

kernels = interpreted("recurrence")

SHAPES: list[RecurrentShape] = [
    ConvShape(300, 3),
    ConvShape(5, 4),
    DeltaShape(2, 2, 8, 8, 4),
    DeltaShape(2, 4, 8, 12, 3),
    DeltaShape(1, 2, 128, 128, 4),
    DeltaShape(2, 6, 16, 72, 2, tiles_outputs=True),
    MambaShape(1, 4, 20, 24, 4),
    MambaShape(2, 4, 16, 8, 4),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("entries", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_a_step_is_that_of_plain_torch(shape: RecurrentShape, entries: Step) -> None:
    weights = weights_of(shape)
    y = inputs_of(weights, num_rows(entries))
    out, state = run(kernels, weights, y, entries)
    for found, correct in zip((out, *state), wanted(weights, y, entries), strict=True):
        torch.testing.assert_close(found, correct, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
@pytest.mark.parametrize("cuts", [(1,), (2, 5), (3, 4, 20)], ids=str)
def test_the_bits_do_not_depend_on_where_a_prompt_is_cut(
    shape: RecurrentShape, cuts: Sequence[int]
) -> None:
    weights = weights_of(shape)
    y = inputs_of(weights, 23)
    whole = run(kernels, weights, y, [(23, StateSlots(4, NO_STATE))])
    edges = [0, *cuts, 23]
    parts = [
        [(stop - start, StateSlots(4, 4 if start else NO_STATE))] for start, stop in pairwise(edges)
    ]
    found = run(kernels, weights, y, *parts)
    for one, other in zip((whole[0], *whole[1]), (found[0], *found[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_padding_and_other_requests_change_no_bits(shape: RecurrentShape) -> None:
    weights = weights_of(shape)
    y = inputs_of(weights, num_rows(DECODES) + 5)
    alone = [run(kernels, weights, y[at : at + 1], [entry]) for at, entry in enumerate(DECODES)]
    out, state = run(kernels, weights, y, DECODES, num_more=5)
    assert torch.equal(out, torch.cat([each for each, _ in alone]))
    for (_, slots), (_, own) in zip(DECODES, alone, strict=True):
        for slot in (slots.slot, *(snapshot.slot for snapshot in slots.snapshots)):
            for one, other in zip(state, own, strict=True):
                assert torch.equal(one[slot], other[slot])


def test_numbers_in_16_bits_are_computed_in_32() -> None:
    weights = weights_of(SHAPES[2])
    y = inputs_of(weights, num_rows(MIXED)).bfloat16()
    out, state = run(kernels, weights, y, MIXED)
    assert out.dtype == torch.bfloat16
    for found, correct in zip((out, *state), wanted(weights, y, MIXED), strict=True):
        torch.testing.assert_close(found, correct, rtol=1e-2, atol=1e-2)


def test_small_time_steps_keep_their_precision() -> None:
    """exp(-16) is 1e-7, less than the rounding of 1."""
    weights = weights_of(MambaShape(1, 2, 8, 8, 4))
    assert isinstance(weights, MambaWeights)
    weights.decay_bias.fill_(-16)
    weights.skip.zero_()
    y = inputs_of(weights, 6)
    y[:, -2:] = 0
    (found, _), (correct, *_) = (
        run(kernels, weights, y, [(6, StateSlots(0, NO_STATE))]),
        wanted(weights, y, [(6, StateSlots(0, NO_STATE))]),
    )
    torch.testing.assert_close(found, correct, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("shape", "is_known"),
    [
        (ConvShape(8, 4), True),
        (ConvShape(8, 5), False),
        (DeltaShape(1, 1, 256, 64, 4), True),
        (DeltaShape(1, 1, 257, 64, 4), False),
        (MambaShape(1, 1, 16, 16, 1), False),
    ],
)
def test_sizes_without_a_kernel_are_known(shape: RecurrentShape, is_known: bool) -> None:
    assert kernels.has_kernels(shape) is is_known
