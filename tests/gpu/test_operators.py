"""Each operator of a GPU beside plain torch in float32 on the same rounded numbers.

Allowed are, relative (L2): 1e-2 for bfloat16 results, 2e-3 for float16; products of 8 bits are
held to their own integers or floats, expanded.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.step import SampleSpec, SamplingParams
from engine.worker.cuda.build_environment import prepare_environment
from engine.worker.cuda.formats import FP8_BY_ROW
from engine.worker.cuda.gpu import TorchGpu
from engine.worker.cuda.kernels import library
from engine.worker.cuda.kernels.reference import FP8, LARGEST
from engine.worker.cuda.model.linears import (
    EightBitLinear,
    FastProducts,
    fp8_linear,
    int8_linear,
)
from engine.worker.cuda.model.operators import CudaOperators
from engine.worker.cuda.model.weight_staging import Staging
from engine.worker.cuda.sampling.sampling_kernels import DeviceSampling
from engine.worker.model.torch_operators import TorchOperators, TorchSampling
from engine.worker.sampling.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

ALLOWED = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
PLAIN = TorchOperators()


@pytest.fixture(scope="module")
def gpu() -> TorchGpu:
    return TorchGpu(0)


def noise(gpu: TorchGpu, *shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(gpu.place, dtype)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def operators(gpu: TorchGpu, dtype: torch.dtype) -> CudaOperators:
    """With our kernels of norms and gates; products are torch's."""
    prepare_environment(gpu.capability)
    rows = library.load(gpu.place, dtype).rows
    assert rows is not None
    return CudaOperators(gpu.place, dtype, "auto", FastProducts(rows))


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("hidden", [64, 100, 896, 4096, 16384])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norms(gpu: TorchGpu, dtype: torch.dtype, hidden: int, rows: int) -> None:
    x = noise(gpu, rows, hidden, dtype=dtype)
    weight = noise(gpu, hidden, seed=1, dtype=dtype)
    norm = operators(gpu, dtype).rms_norm(weight, 1e-5)
    plain = PLAIN.rms_norm(weight.float(), 1e-5)
    assert distance(norm(x), plain(x.float())) < ALLOWED[dtype]
    heads = noise(gpu, rows, 12, 64, seed=2, dtype=dtype)
    weight = noise(gpu, 64, seed=3, dtype=dtype)
    wanted = heads.float()
    PLAIN.rms_norm(weight.float(), 1e-5).apply_(wanted[:, 2:9])
    operators(gpu, dtype).rms_norm(weight, 1e-5).apply_(heads[:, 2:9])
    assert distance(heads, wanted) < ALLOWED[dtype]
    assert torch.equal(norm(x)[:1], norm(x[:1])), "in any company the same bits"


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize(("rows", "width"), [(33, 4864), (3, 4865), (16384, 768)])
def test_gated_activations(
    gpu: TorchGpu, dtype: torch.dtype, name: str, rows: int, width: int
) -> None:
    x = noise(gpu, rows, 2 * width, dtype=dtype)
    found = operators(gpu, dtype).activation(name, is_gated=True)(x)
    assert distance(found, PLAIN.activation(name, is_gated=True)(x.float())) < ALLOWED[dtype]


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("rows", [1, 64, 500])
def test_linears(gpu: TorchGpu, dtype: torch.dtype, rows: int) -> None:
    x = noise(gpu, rows, 896, dtype=dtype)
    weights = [noise(gpu, count, 896, seed=count, dtype=dtype) for count in (896, 128)]
    bias, start = (noise(gpu, *shape, seed=9, dtype=dtype) for shape in ((1024,), (rows, 1024)))
    linear = operators(gpu, dtype).linear(weights, bias)
    wanted = x.double() @ torch.cat(weights).double().T + bias.double()
    assert distance(linear(x), wanted) < ALLOWED[dtype]
    assert distance(linear(x, start.clone()), wanted + start.double()) < ALLOWED[dtype]


@pytest.mark.parametrize("rows", [1, 16, 17, 500])
def test_products_of_8_bit_integers_are_exact(gpu: TorchGpu, rows: int) -> None:
    weight, x = noise(gpu, 128, 896), noise(gpu, rows, 896, seed=1)
    linear = int8_linear([weight], None, torch.bfloat16)
    assert isinstance(linear, EightBitLinear)
    scales = x.float().abs().amax(1, keepdim=True) / 127
    sums = (x.float() / scales).round().double() @ linear.values.double().T
    assert distance(linear(x), sums * scales * linear.scales.T) < 5e-3


@pytest.mark.parametrize("rows", [1, 16, 17, 500])
def test_products_of_8_bit_floats(gpu: TorchGpu, rows: int) -> None:
    if gpu.capability < FP8_BY_ROW:
        pytest.skip("this GPU has no such products")
    weight, x = noise(gpu, 128, 896), noise(gpu, rows, 896, seed=1)
    linear = fp8_linear([weight], None, torch.bfloat16)
    assert isinstance(linear, EightBitLinear)
    scales = x.float().abs().amax(1, keepdim=True) / LARGEST[FP8]
    wanted = (x.float() / scales).to(FP8).double() @ linear.values.double().T
    assert distance(linear(x), wanted * scales * linear.scales.T) < 2e-2  # sums are kept short


def test_rows_are_drawn_as_on_the_cpu(gpu: TorchGpu) -> None:
    vocab = 128_256
    logits = torch.from_numpy(
        3 * np.random.default_rng(1).standard_normal((40, vocab)).astype(np.float32)
    )
    asked = [
        SampleSpec(
            SamplingParams(
                temperature=(0.0, 0.7, 1.2)[row % 3],
                top_p=(1.0, 0.9)[row % 2],
                top_k=(0, 50, 5000)[row // 2 % 3],
                min_p=(0.0, 0.02)[row // 4 % 2],
                repetition_penalty=1.1,
                seed=row,
            ),
            output=tuple(range(row, row + 30)),
            logprobs=3 if row % 5 == 0 else None,
        )
        for row in range(40)
    ]
    places = list(range(40))
    wanted = Sampler(vocab, TorchSampling()).sample(logits.clone(), asked, places)
    kernels = library.load(gpu.place, torch.bfloat16).sampling
    assert kernels is not None
    on_device = DeviceSampling(gpu.put, kernels.sample)
    found = Sampler(vocab, on_device, gpu.put).sample(logits.to(gpu.place), asked, places)
    # exp() is rounded differently there: a point very near a border may fall to its neighbour
    alike = [one == other for one, other in zip(found.tokens, wanted.tokens, strict=True)]
    assert sum(alike) >= 39
    assert found.faults == wanted.faults == ()


def test_weights_arrive_as_they_were(gpu: TorchGpu) -> None:
    whole = torch.randn(1000, 3333, generator=torch.Generator().manual_seed(2)).bfloat16()
    staging = Staging(gpu.place, gpu.streams(), piece_bytes=1 << 20)
    found = [
        staging.copy_to_gpu(whole),
        staging.copy_to_gpu(whole[:, 7:900]),
        staging.copy_to_gpu(whole.t()),
    ]
    for one, wanted in zip(found, (whole, whole[:, 7:900], whole.t()), strict=True):
        assert torch.equal(one.cpu(), wanted)
