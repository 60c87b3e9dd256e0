import pytest
import torch

from engine.worker.ports import Weight, dequantize
from engine.worker.weights.formats import int4, int8
from engine.worker.weights.stored_rows import StoredRows

MATRIX = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "weight", [MATRIX, MATRIX.bfloat16(), int8.quantize(MATRIX), int4.quantize(MATRIX)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_dequantized_matrix(weight: Weight, dtype: torch.dtype) -> None:
    ids = torch.tensor([3, 49, 3, 0])
    found = StoredRows(weight, dtype)(ids)
    assert found.dtype == dtype
    assert torch.equal(found, dequantize(weight).to(dtype)[ids])
