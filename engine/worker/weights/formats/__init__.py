"""Formats of linear weights: one module each, found here by the name in the setting `weights`.

A new format is a module with a `LinearFormat` and its `QuantizedWeight`, a line in this table, and
a linear on each device that computes in it.
"""

import torch

from engine.worker.ports import LinearFormat
from engine.worker.weights.formats.floats import FloatFormat
from engine.worker.weights.formats.int4 import INT4
from engine.worker.weights.formats.int8 import INT8

FORMATS: dict[str, LinearFormat] = {
    "float32": FloatFormat(torch.float32),
    "bfloat16": FloatFormat(torch.bfloat16),
    "int8": INT8,
    "int4": INT4,
}
