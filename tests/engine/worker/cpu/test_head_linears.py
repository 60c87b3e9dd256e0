"""The linears of heads have the bits of dense linears, whatever columns they read and write."""

import pytest
import torch
from torch import Tensor

from engine.worker.cpu.linears import FORMATS, linears_of
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.torch_operators import TorchOperators
from tests.noise import noise

HEADS, ROWS = 3, 7
PLAIN = TorchOperators()
SIZES = [(16, 24), (96, 70), (128, 512), (512, 128)]


def heads_of(width: int, at: int, dim: int, seed: int = 0) -> Tensor:
    """Some columns of each head in wide rows."""
    return noise(ROWS, 2 + HEADS * width, seed=seed)[:, 2:].view(ROWS, HEADS, width)[
        ..., at : at + dim
    ]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_head_has_the_bits_of_its_own_linear(name: str, inputs: int, outputs: int) -> None:
    linears = linears_of(name)
    native = NativeOperators(NativeThreadPool(2), PackedStore({"float32": linears[name]}))
    weights = [noise(outputs, inputs, seed=1 + head) for head in range(HEADS)]
    x, y = heads_of(inputs + 5, 3, inputs), heads_of(outputs + 9, 4, outputs, seed=9)
    whole = y._base
    assert whole is not None
    before = whole.clone()
    native.heads.linear(weights)(x, y)
    for head, weight in enumerate(weights):
        dense = native.linear([weight], None)
        assert torch.equal(y[:, head], dense(x[:, head].contiguous()))
    y.zero_()
    before.as_strided(y.shape, y.stride(), y.storage_offset()).zero_()
    assert torch.equal(whole, before), "nothing else is written"


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_torch_computes_the_same(inputs: int, outputs: int) -> None:
    weights = [noise(outputs, inputs, seed=1 + head) for head in range(HEADS)]
    x, y = heads_of(inputs, 0, inputs), torch.empty(ROWS, HEADS, outputs)
    PLAIN.heads.linear(weights)(x, y)
    expected = torch.stack([x[:, head] @ weights[head].t() for head in range(HEADS)], dim=1)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pairs", [0, 3, 8])
def test_heads_are_copied_with_neighbours_of_pairs_apart(pairs: int) -> None:
    native = NativeOperators(NativeThreadPool(2))
    x, plain, fast = heads_of(21, 2, 16), heads_of(18, 1, 16, seed=1), heads_of(18, 1, 16, seed=1)
    PLAIN.heads.copy(x, plain, pairs)
    native.heads.copy(x, fast, pairs)
    assert plain._base is not None
    assert fast._base is not None
    order = [*range(0, 2 * pairs, 2), *range(1, 2 * pairs, 2), *range(2 * pairs, 16)]
    assert torch.equal(plain, x[..., order])
    assert torch.equal(fast._base, plain._base)
