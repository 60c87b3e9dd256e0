from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.worker.cpu.device import CpuDevice
from engine.worker.cpu.kernels.dtypes import has_half
from engine.worker.cpu.kernels.linears.tile_formats import HAS_BFLOAT16
from engine.worker.cpu.linears import linears_of
from engine.worker.cpu.linears.floats import BFLOAT16
from engine.worker.cpu.linears.packed_store import PackedStore
from engine.worker.cpu.operators import NativeOperators
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.ports import PreferredFormat
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import make_checkpoint, make_model
from tests.noise import noise
from tests.worker_settings import worker_settings

SIZES = [(16, 4), (32, 97), (37, 9), (5, 1), (48, 32), (1500, 70), (2100, 33)]
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]


@pytest.fixture(scope="module")
def operators() -> NativeOperators:
    return NativeOperators(NativeThreadPool(2), PackedStore({"bfloat16": BFLOAT16}))


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 17, 32, 65, 150])
def test_products_of_bfloat16_are_added_in_float32(
    operators: NativeOperators, rows: int, inputs: int, outputs: int
) -> None:
    x, bias, start = noise(rows, inputs), noise(outputs, seed=2), noise(rows, outputs, seed=3)
    weight = noise(outputs, inputs, seed=1).bfloat16()
    inputs_of = x.bfloat16().float() if HAS_BFLOAT16 else x
    expected = inputs_of @ weight.float().T + bias
    linear = operators.linear([weight], bias)
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(linear(x, start.clone()), expected + start, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_has_the_same_bits_beside_any_rows(
    operators: NativeOperators, inputs: int, outputs: int
) -> None:
    linear = operators.linear([noise(outputs, inputs, seed=1).bfloat16()], noise(outputs, seed=2))
    x = noise(150, inputs)
    together = linear(x)
    for first, count in ((0, 1), (1, 2), (3, 3), (6, 31), (37, 100)):
        assert torch.equal(linear(x[first : first + count]), together[first : first + count])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("float16", marks=pytest.mark.skipif(not has_half(), reason="needs F16C")),
        pytest.param("bfloat16", marks=pytest.mark.skipif(HAS_BFLOAT16, reason="rounds inputs")),
    ],
)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_widened_weights_have_the_bits_of_float32_weights(
    name: str, inputs: int, outputs: int
) -> None:
    weight = noise(outputs, inputs, seed=1).to(getattr(torch, name))
    bias, x = noise(outputs, seed=2), noise(55, inputs)
    pool, linears = NativeThreadPool(2), linears_of(name, "float32")
    widened, whole = (
        NativeOperators(pool, PackedStore({each: linears[each]})).linear([same], bias)(x)
        for each, same in ((name, weight), ("float32", weight.float()))
    )
    assert torch.equal(widened, whole)


def test_nan_in_a_row_gives_nan_in_that_row_only(operators: NativeOperators) -> None:
    x = noise(4, 64)
    x[2, 10] = float("nan")
    found = operators.linear([noise(8, 64).bfloat16()], None)(x)
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()


def write_in_bfloat16(directory: Path, variant: str) -> Path:
    path = make_checkpoint(directory, variant) / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    return directory


@pytest.mark.parametrize("variant", ["llama", "qwen2_tied", "qwen3", "gpt2"])
def test_logits_are_nearer_to_float32_than_those_of_transformers_in_bfloat16(
    tmp_path: Path, variant: str
) -> None:
    """At most the inputs of linears are rounded; transformers rounds every intermediate tensor."""
    write_in_bfloat16(tmp_path, variant)
    model, ids = make_model(variant).bfloat16(), torch.tensor([TOKENS])
    with torch.inference_mode():
        in_bfloat16 = model(ids).logits[0, -1].float()
        in_float32 = model.float()(ids).logits[0, -1]
    worker = load_worker(tmp_path, attention="cpu", dtype="bfloat16")
    found = Driver(worker).logits((0, TOKENS))[0]
    spread = in_float32.std()
    assert worker.report.weights.startswith("bfloat16")
    assert (found - in_float32).abs().max() < (in_bfloat16 - in_float32).abs().max()
    # Each input of a linear is off by at most 1/512 of itself: after three layers 1 to 3 % of the
    # logits' standard deviation. Transformers itself is off by 1.5 to 13.5 %.
    assert (found - in_float32).abs().max() < 0.04 * spread
    assert (found - in_bfloat16).abs().max() < 0.2 * spread


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "float16" if has_half() else "float32"),
        ("auto", None, "float32"),
        ("float32", "bfloat16", "float32"),
        ("bfloat16", None, "bfloat16"),
    ],
)
def test_auto_keeps_weights_of_16_bits(dtype: str, stored: str | None, expected: str) -> None:
    settings = worker_settings("", dtype=dtype, attention="cpu", threads=1)
    device = CpuDevice(settings, PreferredFormat(floats=stored))
    assert device.formats.linear is not None
    assert device.formats.linear.name == expected
