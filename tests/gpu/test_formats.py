"""Checkpoints with quantized linears in a worker on each device, as they are stored, beside the
model of their numbers in transformers (`pairs`).

The rest of the error is that of rounding: of activations to 8 bits on a GPU, where their products
are in 8 bits, and of matrices that are stored in 5 or 6 bits, or by activation, to 8.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gguf.constants import GGMLQuantizationType as Kind

from engine.worker.process.worker import Worker
from tests.adapters.models import test_fp8_checkpoint as fp8
from tests.adapters.models import test_int4_checkpoint as int4
from tests.adapters.models import test_int8_checkpoint as int8
from tests.adapters.models import test_mxfp4_checkpoint as mxfp4
from tests.gpu.pairs import DEVICES, GENTLE, Pair, oracle_of, settings_on
from tests.models.gguf_files import Gguf

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
WIDE |= {"scale": GENTLE}
MIXED = {"attn_v": Kind.Q6_K, "ffn_down": Kind.IQ4_XS, "attn_output": Kind.Q4_0}
EXPERTS = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "scale": GENTLE}
STEPS = ((100, 9, 100), (1, 30, 1), (1, 1, 1), (20, 70, 1))


class Format(NamedTuple):
    """How a checkpoint is written, and the relative errors that are allowed beside `pairs`."""

    write: Callable[[Path], Any]
    reported: str  # by a worker on a GPU
    on_cpu: float = 1e-3  # with 14-bit activations
    on_gpu: float = 0.0


def gguf(kind: Kind, variant: str = "llama", **more: Any) -> Callable[[Path], Any]:
    """Writes a file into a directory."""
    return lambda folder: Gguf(variant, kind, **more).write(folder / "model.gguf")


FORMATS = {
    "int8": Format(partial(int8.write, **WIDE), "int8", on_gpu=0.07),
    "pack-quantized": Format(partial(int4.write, scale=GENTLE, kind="pack-quantized"), "int4_64"),
    "asymmetric": Format(partial(int4.write, scale=GENTLE, kind="asymmetric"), "uint4_64"),
    "awq": Format(partial(int4.write, scale=GENTLE, kind="awq", group=128), "uint4_128"),
    "gptq": Format(partial(int4.write, scale=GENTLE, kind="gptq"), "uint4_64"),
    "gptq by activation": Format(
        partial(int4.write, scale=GENTLE, kind="gptq ordered"), "int8", 0.03, 0.07
    ),
    "fp8 channels": Format(partial(fp8.write, scheme="channels", **WIDE), "fp8", 0.02, 0.2),
    "fp8 tensors": Format(partial(fp8.write, scheme="tensors", **WIDE), "fp8", 0.02, 0.2),
    "fp8 blocks": Format(partial(fp8.write, scheme="large blocks", **WIDE), "fp8", 0.02),
    "mxfp4": Format(partial(mxfp4.write, scale=GENTLE), "mxfp4"),
    "Q8_0": Format(gguf(Kind.Q8_0, changes=WIDE), "bfloat16"),
    "Q4_K and others": Format(
        gguf(Kind.Q4_K, kinds=MIXED, changes=WIDE), "int4+q4_k+int8", on_gpu=0.07
    ),
    "MXFP4 in GGUF": Format(
        gguf(Kind.Q8_0, "gpt_oss", kinds={"_exps": Kind.MXFP4}, changes=EXPERTS),
        "mxfp4+int8",
        on_gpu=0.07,
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_linears_are_computed_as_stored(
    name: str, device: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    form, stored = FORMATS[name], tmp_path / "stored"
    stored.mkdir()
    model = form.write(stored)
    oracle = oracle_of(model, tmp_path / "floats", device)
    exact = {"activation_bits": "14"} if device == "cpu" else {}
    path = next(iter(stored.glob("*.gguf")), stored)
    worker = Worker.load(settings_on(device, path, **exact), lambda *_: None)
    if device != "cpu":
        assert worker.report.weights == form.reported
    allowed = max(oracle.tolerance, form.on_cpu if device == "cpu" else form.on_gpu)
    errors = Pair(model, allowed, worker).errors(STEPS)
    record_property("largest error", round(max(errors), 4))
    Pair(model, allowed, worker).check(errors)
