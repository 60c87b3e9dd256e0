import pytest
import torch
from torch import Tensor

from engine.step import NO_STATE, SamplingParams, StateSlots
from engine.worker.cuda.kernels import library, reference
from engine.worker.cuda.kernels.reference import FP8
from engine.worker.cuda.kernels.tiling import (
    EIGHT_BIT,
    FEW_ROWS_4_BIT,
    FIXED,
    FIXED_4_BIT,
    MORE_ROWS_8_BIT,
    NARROW_4_BIT,
    WIDE,
    WIDE_4_BIT,
    four_bit_tiling,
    fp8_weight_tiling,
)
from engine.worker.cuda.model.four_bit import packed
from engine.worker.cuda.model.loras import CapturedLoras
from engine.worker.cuda.sampling.sampling_kernels import DeviceSampling
from engine.worker.cuda.streams import CudaStreams
from engine.worker.model.experts import route
from engine.worker.model.torch_operators import TorchSampling
from engine.worker.ports import ConvShape, DeltaShape, MambaShape, RecurrentShape, Routing
from engine.worker.weights.formats.fp8 import Fp8Weight
from tests.engine.worker.cpu.recurrences import inputs_of
from tests.engine.worker.cuda.adapters import an_adapter
from tests.engine.worker.cuda.kernels.recurrent_steps import (
    MIXED,
    num_rows,
    on,
    run,
    wanted,
    weights_of,
)
from tests.engine.worker.cuda.stored_weights import stored
from tests.engine.worker.sampling.draws import draws_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def kernels() -> library.TritonKernels:
    return library.load(GPU, torch.bfloat16)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(GPU)


def test_every_kernel_passes_its_trial(kernels: library.TritonKernels) -> None:
    assert [name for name in library.TRIALS if getattr(kernels, name) is None] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, FP8])
@pytest.mark.parametrize("tiling", [FIXED, WIDE, EIGHT_BIT, MORE_ROWS_8_BIT], ids=str)
def test_products_and_their_independence_of_other_rows(
    kernels: library.TritonKernels, dtype: torch.dtype, tiling: object
) -> None:
    gemm = kernels.gemm
    assert gemm is not None
    scale = 20 if dtype == torch.int8 else 1
    x, weight = (noise(64, 896) * scale).to(dtype), (noise(1152, 896, seed=1) * scale).to(dtype)
    found = gemm.product(x, weight, tiling, torch.float32, gemm.Epilogue())
    library.check("product", found, reference.product(x, weight, torch.float32))
    alone = gemm.product(x[7:8], weight, tiling, torch.float32, gemm.Epilogue())
    assert torch.equal(alone[0], found[7])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tiling",
    [FIXED_4_BIT, FEW_ROWS_4_BIT, WIDE_4_BIT, NARROW_4_BIT, four_bit_tiling(64, 4096)],
    ids=str,
)
@pytest.mark.parametrize("name", ["int4", "uint4_128", "mxfp4"])
def test_products_with_4_bit_weights(
    kernels: library.TritonKernels, name: str, tiling: object, dtype: torch.dtype
) -> None:
    four_bit = kernels.four_bit
    assert four_bit is not None
    weight = packed([stored(name, 1152, 896).map(lambda tensor: tensor.to(GPU))])
    x, everything = noise(64, 896).to(dtype), slice(0, 1152)
    exact = reference.unpack(weight, everything, torch.float32)
    library.check("4-bit weight", four_bit.unpack(weight, everything, dtype), exact, 5e-3)
    found = four_bit.product(x, weight, tiling, four_bit.Epilogue())
    library.check("4-bit product", found, reference.product(x, exact, torch.float32), 5e-3)
    alone = four_bit.product(x[7:8], weight, tiling, four_bit.Epilogue())
    assert torch.equal(alone[0], found[7])


@pytest.mark.parametrize("run", [128, 896])
@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_products_with_the_fp8_weights_of_checkpoints(
    kernels: library.TritonKernels, rows: int, run: int
) -> None:
    """With scales of blocks, and of output channels."""
    module, tiling = kernels.fp8_weights, fp8_weight_tiling(rows, 1152)
    assert module is not None
    assert tiling is not None
    x, values = noise(rows, 896).bfloat16(), noise(1152, 896, seed=1).to(FP8)
    scales = noise(1152, 896 // run, seed=2).abs()
    found = module.product(x, values, scales, run, tiling)
    weight = Fp8Weight(values, scales, run).dequantize()
    library.check("product", found, reference.product(x, weight, torch.bfloat16))


def test_sampled_ids_of_a_large_vocabulary(kernels: library.TritonKernels) -> None:
    assert kernels.sampling is not None
    vocab, rows = 128_256, 48
    some = [
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=50, top_p=0.8, min_p=0.01),
    ]
    points = [(row + 0.5) / rows for row in range(rows)]
    draws = draws_of([some[row % 3] for row in range(rows)], points)
    on_device = DeviceSampling(lambda a: torch.from_numpy(a).to(GPU), kernels.sampling.sample)
    logits = 3 * noise(rows, vocab)
    found = on_device.sample(logits, draws).tolist()
    wanted = TorchSampling().sample(logits, draws).tolist()
    # exp() is rounded differently: a point very near a border may fall to its neighbour
    assert sum(one == other for one, other in zip(found, wanted, strict=True)) >= rows - 1


@pytest.mark.parametrize(
    "shape",
    [
        ConvShape(2048, 3),
        DeltaShape(16, 32, 128, 128, 4),
        DeltaShape(16, 32, 128, 128, 4, tiles_outputs=True),
        MambaShape(1, 48, 128, 64, 4),
        MambaShape(1, 24, 256, 64, 4),
    ],
    ids=str,
)
def test_recurrent_layers_and_their_independence_of_where_a_prompt_is_cut(
    kernels: library.TritonKernels, shape: RecurrentShape
) -> None:
    """In the sizes of LFM2, Qwen3.5-4B, Granite 4 and Falcon-H1."""
    recurrence = kernels.recurrence
    assert recurrence is not None
    weights = on(GPU, weights_of(shape))
    y = inputs_of(weights, num_rows(MIXED)).to(GPU)
    found, state = run(recurrence, weights, y, MIXED)
    for one, correct in zip((found, *state), wanted(weights, y, MIXED), strict=True):
        torch.testing.assert_close(one, correct, rtol=1e-3, atol=1e-3)
    y = inputs_of(weights, 100).to(GPU)
    whole = run(recurrence, weights, y, [(100, StateSlots(4, NO_STATE))])
    parts = [[(1, StateSlots(4, NO_STATE))], [(60, StateSlots(4, 4))], [(39, StateSlots(4, 4))]]
    cut = run(recurrence, weights, y, *parts)
    for one, other in zip((whole[0], *whole[1]), (cut[0], *cut[1]), strict=True):
        assert torch.equal(one, other)


def test_rows_with_adapters_of_their_own(kernels: library.TritonKernels) -> None:
    """In the widths of Llama-3.1-8B's q, k and v."""
    widths, ranks = [4096, 1024, 1024], ([16, 16, 16], [64, 0, 8])
    assert kernels.lora is not None
    loras = CapturedLoras(widths, 64, CudaStreams(GPU), kernels.lora)
    adapters = [an_adapter(4096, widths, each, torch.bfloat16, 1, "cuda") for each in ranks]
    for slot, adapter in enumerate(adapters):
        loras.put(slot, adapter)
    x, y = (noise(9, width, seed=width).bfloat16() for width in (4096, sum(widths)))
    slots = torch.tensor([0, 1, -1, 0, 0, 1, 1, -1, 0], device=GPU)
    wanted, found, alone = y.clone(), y.clone(), y[4:5].clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            adapters[slot](x[row : row + 1], wanted[row : row + 1])
    loras(x, found, slots)
    library.check("LoRA", found, wanted)
    loras(x[4:5], alone, slots[4:5])
    assert torch.equal(found[4], alone[0])


@pytest.mark.parametrize("rows", [1, 64, 1000])
def test_experts_are_chosen_and_summed_as_by_torch(
    kernels: library.TritonKernels, rows: int
) -> None:
    """In the sizes of Qwen3-30B-A3B."""
    assert kernels.experts is not None
    logits, routing = noise(rows, 128), Routing(8, renormalizes=True)
    found = kernels.experts.choose(logits, routing)
    ids, weights = route(logits, routing)
    experts, order = ids.flatten().sort(stable=True)
    torch.testing.assert_close(found.weights, weights)
    assert torch.equal(found.experts, experts)
    assert torch.equal(found.sources, order // 8)
    results = noise(8 * rows, 2048, seed=1).bfloat16()
    wanted = (results.float()[found.places.long()] * weights[:, :, None]).sum(dim=1)
    library.check("sum", kernels.experts.add_up(results, found, None), wanted)
