"""Products with float weights by our kernel, at the sizes of an 8B model, and kernels that are
launched while the one before still runs."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.worker.cuda.build_environment import prepare_environment
from engine.worker.cuda.gpu import TorchGpu
from engine.worker.cuda.kernels import library
from engine.worker.cuda.kernels.tiling import tiling_of
from engine.worker.cuda.model.fusion import LinearWithGate
from engine.worker.cuda.model.linears import FastProducts, FloatLinear
from engine.worker.cuda.model.operators import FusedGate, FusedRmsNorm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

ALLOWED = 1e-2  # the relative error (L2) of results in bfloat16
HIDDEN, INNER = 4096, 14336


@pytest.fixture(scope="module")
def fast() -> FastProducts:
    gpu = TorchGpu(0)
    prepare_environment(gpu.capability)
    kernels = library.load(gpu.place, torch.bfloat16)
    assert kernels.rows is not None
    assert kernels.gemm is not None
    return FastProducts(kernels.rows, kernels.gemm)


def noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize(
    ("outputs", "width"),
    [(6144, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, INNER), (2 * INNER, HIDDEN), (4100, 3080)],
)
def test_products_added_to_the_residual(
    fast: FastProducts, rows: int, outputs: int, width: int
) -> None:
    x, weight = noise(rows, width, seed=1), noise(outputs, width, seed=2)
    bias, start = noise(outputs, seed=3), noise(rows, outputs, seed=4)
    found = FloatLinear(weight, bias, fast)(x, start.clone())
    wanted = x.double() @ weight.double().T + bias.double() + start.double()
    assert distance(found, wanted) < ALLOWED
    assert tiling_of(rows, weight) is not None or rows > 16, "up to 16 rows all are ours"


@pytest.mark.parametrize(
    ("name", "has_bias"), [("silu", False), ("gelu", True), ("gelu_pytorch_tanh", False)]
)
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65])
def test_gates_computed_with_the_product_before_them(
    fast: FastProducts, rows: int, name: str, has_bias: bool
) -> None:
    x = noise(rows, HIDDEN, seed=1)
    weight = noise(2 * INNER, HIDDEN, seed=2) / HIDDEN**0.5
    bias = noise(2 * INNER, seed=3) if has_bias else None
    assert fast.rows is not None
    gate = FusedGate(name, fast.rows)
    found = LinearWithGate(FloatLinear(weight, bias, fast), gate)(x)
    assert distance(found, gate(FloatLinear(weight, bias)(x))) < ALLOWED


@dataclass
class Mlp:
    """A norm, and a gated MLP that is added to the residual; each kernel reads what the one before
    wrote."""

    fast: FastProducts

    def __post_init__(self) -> None:
        rows, weight = self.fast.rows, torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        assert rows is not None
        up = noise(2 * INNER, HIDDEN, seed=2) / HIDDEN**0.5
        down = noise(HIDDEN, INNER, seed=3) / INNER**0.5
        self.norm = FusedRmsNorm(weight, 1e-5, rows)
        self.up = LinearWithGate(FloatLinear(up, None, self.fast), FusedGate("silu", rows))
        self.down = FloatLinear(down, None, self.fast)

    def __call__(self, hidden: Tensor, times: int, *, waits: bool) -> Tensor:
        synchronize: Callable[[], None] = torch.cuda.synchronize if waits else lambda: None
        for _ in range(times):
            x = self.norm(hidden)
            synchronize()
            x = self.up(x)
            synchronize()
            self.down(x, hidden)
            synchronize()
        return hidden


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_kernels_launched_early_have_the_bits_of_kernels_one_by_one(
    fast: FastProducts, rows: int
) -> None:
    mlp = Mlp(fast)
    start = noise(rows, HIDDEN, seed=5)
    with torch.inference_mode():
        wanted = mlp(start.clone(), 20, waits=True)
        assert torch.equal(mlp(start.clone(), 20, waits=False), wanted)
        hidden, graph = start.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mlp(hidden, 20, waits=False)
        for _ in range(5):
            hidden.copy_(start)
            graph.replay()
            assert torch.equal(hidden, wanted)
