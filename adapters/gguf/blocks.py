"""Quantized tensors of GGUF files in the formats that the engine computes in as they are stored."""

from collections.abc import Mapping
from types import MappingProxyType

from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from engine.worker.weights.formats.blocks import BlockFormat
from engine.worker.weights.formats.grouped import GroupedWeight
from engine.worker.weights.formats.llama_cpp import BLOCKS

FORMATS: Mapping[Kind, BlockFormat] = MappingProxyType(
    {
        Kind.Q4_0: BLOCKS["int4"],
        Kind.Q4_1: BLOCKS["q4_1"],
        Kind.Q5_0: BLOCKS["q5_0"],
        Kind.Q5_1: BLOCKS["q5_1"],
        Kind.Q8_0: BLOCKS["q8_0"],
        Kind.Q2_K: BLOCKS["q2_k"],
        Kind.Q3_K: BLOCKS["q3_k"],
        Kind.Q4_K: BLOCKS["q4_k"],
        Kind.Q5_K: BLOCKS["q5_k"],
        Kind.Q6_K: BLOCKS["q6_k"],
        Kind.IQ4_NL: BLOCKS["iq4_nl"],
        Kind.IQ4_XS: BLOCKS["iq4_xs"],
        Kind.MXFP4: BLOCKS["mxfp4"],
    }
)


def stored_weight(rows: Tensor, kind: Kind, inputs: int) -> GroupedWeight:
    """A weight of rows of blocks, uint8 `[out, bytes]`; `kind` is a key of `FORMATS`."""
    return FORMATS[kind].weight(rows, inputs)
