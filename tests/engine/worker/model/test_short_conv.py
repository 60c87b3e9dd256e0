"""The short convolution: the bits of a row do not depend on the rows beside it or on the cuts."""

from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.step import NO_STATE
from engine.worker.model.short_conv import convolved
from engine.worker.ports import StateRuns

CHANNELS, SLOTS = 10, 6


def run(
    taps: Tensor,
    bias: Tensor,
    rows: Tensor,
    state: Tensor,
    *runs: tuple[int, int, int, int],
) -> Tensor:
    """Runs are their first row, the row behind the last, and the slots read and written."""
    writes = np.full((len(rows), 2), NO_STATE, dtype=np.int64)
    for _, last, _, slot in runs:
        writes[last - 1, 0] = slot
    return convolved(rows, taps, bias, state, StateRuns(np.array([r[:3] for r in runs]), writes))


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_it_is_a_causal_convolution_of_each_channel(kernel: int) -> None:
    taps, bias, rows = (torch.randn(n, CHANNELS) for n in (kernel, 1, 9))
    found = run(taps, bias[0], rows, torch.zeros(SLOTS, kernel - 1, CHANNELS), (0, 9, NO_STATE, 1))
    padded = torch.cat((torch.zeros(kernel - 1, CHANNELS), rows)).t()
    weight = taps.t()[:, None]
    expected = torch.nn.functional.conv1d(padded, weight, bias[0], groups=CHANNELS).t()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("seed", range(10))
def test_a_prompt_in_pieces_beside_others_has_the_same_bits(seed: int) -> None:
    random = Random(seed)
    taps, (bias,), rows = (torch.randn(n, CHANNELS) for n in (3, 1, 20))
    whole, state = torch.zeros(SLOTS, 2, CHANNELS), torch.zeros(SLOTS, 2, CHANNELS)
    expected = run(taps, bias, rows, whole, (0, 20, NO_STATE, 1))
    at, source, found = 0, NO_STATE, []
    while at < 20:
        count, before = random.randint(1, 20 - at), random.randint(1, 4)
        others = torch.randn(before, CHANNELS)
        step = torch.cat((others, rows[at : at + count]))
        slot = 1 + at % 2
        runs = (0, before, NO_STATE, 4), (before, before + count, source, slot)
        found.append(run(taps, bias, step, state, *runs)[before:])
        at, source = at + count, slot
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(state[source], whole[1])


def test_a_request_without_a_state_reads_none_of_another_one() -> None:
    taps, (bias,), rows = (torch.randn(n, CHANNELS) for n in (3, 1, 4))
    state = torch.full((SLOTS, 2, CHANNELS), torch.nan)  # as of a request that ended with an error
    assert run(taps, bias, rows, state, (0, 4, NO_STATE, 1)).isfinite().all()
