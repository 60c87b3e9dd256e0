"""Formats of linear weights.

`FORMATS` are those that weights may be converted to, by the name in the setting `weights`. A new
one is a module with a `LinearFormat` and its `QuantizedWeight`, a line in this table, and a linear
on each device that computes in it. `LAYOUTS` are those of quantized checkpoints, in which the CPU
computes as they are stored.
"""

import torch

from engine.worker.ports import LinearFormat
from engine.worker.weights.formats import llama_cpp
from engine.worker.weights.formats.floats import FloatFormat
from engine.worker.weights.formats.grouped import GroupLayout
from engine.worker.weights.formats.int4 import INT4, SYMMETRIC, WITH_ZEROS
from engine.worker.weights.formats.int8 import INT8
from engine.worker.weights.formats.mxfp4 import MXFP4

FORMATS: dict[str, LinearFormat] = {
    "float32": FloatFormat(torch.float32),
    "float16": FloatFormat(torch.float16),
    "bfloat16": FloatFormat(torch.bfloat16),
    "int8": INT8,
    "int4": INT4,
}
LAYOUTS: dict[str, GroupLayout] = {
    layout.name: layout
    for layout in (*SYMMETRIC.values(), *WITH_ZEROS.values(), *llama_cpp.LAYOUTS, MXFP4)
}
