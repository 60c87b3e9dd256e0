import pytest
import torch

from adapters.attention.reference import ReferenceAttention
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.cuda.kernels.reference import FP8, fp8_of
from engine.worker.ports import KVTensors
from tests.adapters.attention.flashinfer_cases import Paged, make


def test_what_is_beyond_becomes_the_largest_and_the_rest_the_nearest() -> None:
    rows = torch.tensor([1e6, -500.0, 448.0, 0.3, 17.0, -0.001])
    found = fp8_of(rows, 1.0).float().tolist()
    assert found == [448.0, -448.0, 448.0, 0.3125, 16.0, -(2.0**-9)]
    assert fp8_of(rows, 4.0).float().tolist()[:3] == [448.0, -128.0, 112.0]


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.25, 2.0)])
def test_the_reference_keeps_and_reads_them_as_flashinfer_does(
    scales: tuple[float, float],
) -> None:
    made = make(60, 4, kv_dtype=FP8, dtype=torch.bfloat16, scales=scales)
    own = KVTensors((made.cache.keys[0].clone(),), (made.cache.values[0].clone(),), 1)
    reference = ReferenceAttention(made.spec, own, NativeThreadPool(1))
    layout = Paged(((7, 1), (30, 1), (3, 9)), 4).layout()
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn((11, 8, 8), generator=generator).to(torch.bfloat16)
    q, k, v = torch.split(fused, [4, 2, 2], dim=1)
    answers = []
    for attention in (made.attention, reference):
        attention.plan(layout)
        made.stand_in.catch_up()
        answers.append(attention.run(0, q, k, v, None))
    torch.testing.assert_close(*answers, rtol=1e-2, atol=1e-2)
    for one, other in zip(made.cache.in_memory_order(), own.in_memory_order(), strict=True):
        assert one.dtype == torch.uint8
        assert torch.equal(one, other)
