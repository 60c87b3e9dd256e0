"""Kernels of LoRA adapters under Triton's interpreter against plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.cuda.model.loras import CapturedLoras
from engine.worker.model.torch_operators import TorchLowRank
from tests.engine.worker.cuda.adapters import an_adapter
from tests.engine.worker.cuda.kernels.interpreted import interpreted
from tests.engine.worker.cuda.standin import StandInStreams
from tests.noise import noise

kernels = interpreted("lora")


@settings(deadline=None, max_examples=30)
@given(
    slots=st.lists(st.sampled_from([-1, 0, 3, 63]), min_size=1, max_size=5),
    inputs=st.sampled_from([16, 300, 512]),
    widths=st.lists(st.sampled_from([8, 64, 100]), min_size=1, max_size=3),
    ranks=st.lists(st.sampled_from([0, 1, 16, 24]), min_size=9, max_size=9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_each_row_gets_what_its_own_adapter_adds(
    slots: list[int], inputs: int, widths: list[int], ranks: list[int], dtype: torch.dtype
) -> None:
    loras = CapturedLoras(widths, 24, StandInStreams(), kernels)
    adapters: dict[int, TorchLowRank | None] = {}
    for number, slot in enumerate((0, 3, 63)):
        own = ranks[3 * number : 3 * number + len(widths)]
        adapters[slot] = an_adapter(inputs, widths, own, dtype, number) if any(own) else None
        loras.put(slot, adapters[slot])
    wide = noise(len(slots), inputs + 8, seed=8, dtype=dtype)
    x, y = wide[:, :inputs], noise(len(slots), sum(widths), seed=9, dtype=dtype)
    wanted = y.clone()
    for row, slot in enumerate(slots):
        adapter = adapters.get(slot)
        if adapter is not None:
            adapter(x[row : row + 1], wanted[row : row + 1])
    loras(x, y, torch.tensor(slots))
    rough = 5e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(y, wanted, rtol=rough, atol=rough * float(wanted.abs().max()))


def test_a_row_has_the_same_bits_in_any_company_and_a_slot_can_be_used_again() -> None:
    widths, dtype = [64, 32], torch.bfloat16
    loras = CapturedLoras(widths, 16, StandInStreams(), kernels)
    one, other = (an_adapter(128, widths, [16, 8], dtype, seed) for seed in (1, 2))
    x, y = noise(6, 128, dtype=dtype), noise(6, 96, seed=3, dtype=dtype)
    loras.put(5, one)
    together, alone = y.clone(), y[2:3].clone()
    loras(x, together, torch.tensor([5, -1, 5, 5, -1, 5]))
    loras(x[2:3], alone, torch.tensor([5]))
    assert torch.equal(together[2], alone[0])
    assert torch.equal(together[1], y[1])
    loras.put(5, other)
    again = y[2:3].clone()
    loras(x[2:3], again, torch.tensor([5]))
    assert not torch.equal(again, alone)
    loras.put(5, None)
    unchanged = y.clone()
    loras(x, unchanged, torch.full((6,), 5))
    assert torch.equal(unchanged, y)


@pytest.mark.parametrize("columns", [1, 64, 65])
def test_the_last_block_of_a_part_ends_with_it(columns: int) -> None:
    loras = CapturedLoras([columns, 3], 4, StandInStreams(), kernels)
    adapter = an_adapter(16, [columns, 3], [4, 0], torch.float32, 1)
    loras.put(0, adapter)
    x, y = noise(1, 16), torch.zeros(1, columns + 3)
    loras(x, y, torch.tensor([0]))
    wanted = torch.zeros_like(y)
    adapter(x, wanted)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    assert not y[:, columns:].any()
