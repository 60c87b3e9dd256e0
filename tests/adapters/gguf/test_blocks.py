import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from adapters.gguf.blocks import FORMATS, stored_weight
from engine.errors import StartupError

FLOAT16S = {  # bytes at which a block has one
    Kind.Q4_1: (0, 2),
    Kind.Q5_1: (0, 2),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_random_blocks_are_dequantized_to_the_same_bits(kind: Kind) -> None:
    random = np.random.default_rng(0)
    inputs, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (40, 3, block_bytes), dtype=np.uint8)
    for at in FLOAT16S.get(kind, (0,)):
        numbers = random.standard_normal((40, 3, 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = numbers.view(np.uint8)
    if kind is Kind.MXFP4:
        blocks[:, :, 0] = random.integers(104, 144, (40, 3))  # exponents that float16 has
    rows = blocks.reshape(40, -1)
    weight = stored_weight(torch.from_numpy(rows), kind, 3 * inputs)
    assert torch.equal(weight.dequantize(), torch.from_numpy(dequantize(rows, kind)))
    assert torch.equal(weight.rows(slice(7, 9)).dequantize(), weight.dequantize()[7:9])


def test_scales_of_mxfp4_that_float16_lacks_are_named() -> None:
    rows = torch.zeros(2, 17, dtype=torch.uint8)
    rows[1, 0] = 150
    with pytest.raises(StartupError, match=r"scales of 2 \*\* -127 to 2 \*\* 23, which float16"):
        stored_weight(rows, Kind.MXFP4, 32).dequantize()
