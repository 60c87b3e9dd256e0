"""What is compiled for attention at a first start; the build itself is in the tests of the GPU
check."""

import pytest
import torch

from adapters.attention.flashinfer.backend import (
    Fa2FlashInferAttention,
    FlashInferAttention,
    XqaFlashInferAttention,
)
from tests.adapters.attention.flashinfer_cases import make


@pytest.mark.parametrize(
    ("kind", "capability", "with_xqa"),
    [
        (FlashInferAttention, (9, 0), True),
        (FlashInferAttention, (8, 0), False),
        (XqaFlashInferAttention, (9, 0), True),
        (Fa2FlashInferAttention, (9, 0), False),
    ],
)
def test_xqa_is_compiled_beside_fa2_where_it_may_be_used(
    kind: type[FlashInferAttention], capability: tuple[int, int], with_xqa: bool
) -> None:
    made = make(
        60,
        16,
        capability=capability,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        dim=64,
        kind=kind,
    )
    assert made.stand_in.compiled == [(16, with_xqa)]
