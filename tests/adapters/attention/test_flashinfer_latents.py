"""Attention to latent vectors by FlashInfer's module: on a stand-in, and, where FlashInfer is
installed, beside its own wrapper down to the compiled module."""

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.attention.flashinfer.backend import FlashInferAttention
from adapters.attention.flashinfer.latents import MAX_PIECES
from adapters.attention.flashinfer.library import FlashInfer
from adapters.attention.flashinfer.ports import DeviceEvent, Library
from engine.errors import StartupError
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layout import blank_layout, padded
from engine.worker.ports import AttentionSpec, ModelShape, RaggedLayout, StepLimits
from tests.adapters.attention.flashinfer_cases import LIMITS, Made, Paged
from tests.attention_backends import gpu_cache
from tests.flashinfer_stand_in import StandIn

LATENT, TURNED = 512, 64
DIM = LATENT + TURNED
MIXED = Paged(((7, 1), (30, 3)), 4)
DECODES = Paged(((7, 1), (30, 1)), 4)


def make(
    heads: int,
    dtype: torch.dtype = torch.float32,
    limits: StepLimits = LIMITS,
    library: Library | None = None,
) -> Made:
    """60 pages of 4 tokens, and a spare one."""
    shape = ModelShape(1, heads, 1, DIM, 1, 1, 1, 1, 1, values_from=TURNED)
    cache = gpu_cache(shape, 60, 4, dtype)
    generator = torch.Generator().manual_seed(0)
    cache.keys[0].copy_(torch.randn(cache.keys[0].shape, generator=generator))
    spec = AttentionSpec(heads, 1, DIM, 0.1, None, dtype, limits=limits, values_from=TURNED)
    stand_in = StandIn()
    attention = FlashInferAttention(spec, cache, NativeThreadPool(1), library or stand_in)
    return Made(attention, stand_in, cache, spec)


def rows_of(made: Made, count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    heads = made.spec.num_heads
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn((count, heads + 1, DIM), generator=generator).to(made.spec.dtype)
    q, k = torch.split(fused, [heads, 1], dim=1)
    return q, k


def run(made: Made, count: int, seed: int = 1) -> Tensor:
    made.stand_in.catch_up()
    return made.attention.run(0, *rows_of(made, count, seed), None, None)


def mixed(layout: RaggedLayout) -> RaggedLayout:
    return replace(layout, num_decodes=0)


@pytest.mark.parametrize("heads", [16, 5, 128])
@pytest.mark.parametrize("size", [8, 64])
def test_graphs_of_all_sizes_share_one_plan_and_find_what_eager_steps_find(
    heads: int, size: int
) -> None:
    made = make(heads)
    blank = blank_layout(size, 60, 4)
    before = made.attention.plan_captured(blank if size == 8 else mixed(blank))
    for turn in range(4):
        step = Paged(((turn, 1),) * 3 + (((turn, 1 + turn),) if size == 64 else ()), 4, seed=turn)
        layout = step.layout()
        baked = made.attention.plan_captured(padded(layout, size, 60))
        assert baked == before, "a graph contains these numbers"
        in_graph = run(made, size, turn)[: layout.num_tokens]
        pages = made.last_plan("run")["indices"].data_ptr()
        made.attention.plan(layout)
        q, k = rows_of(made, size, turn)
        q, k = q[: layout.num_tokens], k[: layout.num_tokens]
        made.stand_in.catch_up()
        eager = made.attention.run(0, q, k, None, None)
        torch.testing.assert_close(in_graph, eager, rtol=0, atol=0)
        assert made.last_plan("run")["indices"].data_ptr() == pages


def test_a_plan_whose_copy_is_pending_is_not_written_over() -> None:
    made = make(16)
    for length in (1, 5):
        layout = padded(Paged(((length, 1),) * 3, 4).layout(), 8, 60)
        made.attention.plan_captured(layout)
    made.stand_in.catch_up()
    copied = [given["kv_len"][0].item() for name, given in made.stand_in.calls if name == "copied"]
    assert copied == [2, 6]


def test_only_as_many_pieces_as_a_plan_holds_are_accepted() -> None:
    most = StepLimits(max_requests=256, max_tokens=15000, max_model_len=128)
    make(128, limits=most)
    make(20, limits=replace(most, max_tokens=4 * 15000))
    with pytest.raises(StartupError, match=r"max_batch_tokens=16384 .* pieces with 128 heads; .*"):
        make(128, limits=replace(most, max_tokens=MAX_PIECES))


class Module:
    """Stands in for the compiled module: what it is given."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.plans: list[tuple[Any, ...]] = []
        self.runs: list[tuple[Any, ...]] = []

    def make(self, *given: Any) -> "Module":
        self.made.append(given)
        return self

    def build_and_load(self) -> "Module":
        return self

    def plan(self, *given: Any) -> list[int]:
        self.plans.append((*(each.clone() for each in given[3:6]), *given[6:]))
        return [1, 2, 3]

    def plan_with_staged_workspace_bytes(self, *given: Any) -> tuple[list[int], int]:
        return self.plan(*given), 0

    def run(self, *given: Any) -> None:
        self.runs.append(given)


class OnCpu(FlashInfer):
    """The library without a GPU."""

    num_processors = 132
    capability = 9, 0

    def compile(self, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
        """Compile nothing."""

    def decode_kernels(self) -> None:
        """None are needed."""

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> DeviceEvent:
        return StandIn().event()


@pytest.fixture(scope="module")
def library() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("flashinfer.mla")
        except ImportError:
            pytest.skip("flashinfer is not installed")


@pytest.fixture
def module(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """In place of what FlashInfer compiles, on an H200 as its wrapper sees one."""
    found, real = Module(), torch.zeros
    common = importlib.import_module("flashinfer.mla._batch_mla._backends._fa_common")

    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made: Tensor = real(*sizes, **options)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    jit = importlib.import_module("flashinfer.jit")
    for place in (jit, common):
        monkeypatch.setattr(place, "gen_batch_mla_module", found.make)
    for name, value in {
        "get_compute_capability": (9, 0),
        "is_sm90a_supported": True,
        "_get_fa_shared_memory_limits": (233472, 232448),
        "get_device_sm_count": 132,
    }.items():
        monkeypatch.setattr(common, name, lambda *_, value=value: value)
    common.get_batch_mla_module.cache_clear()
    yield found
    common.get_batch_mla_module.cache_clear()


def wrapper_plan(library: ModuleType, layout: RaggedLayout, heads: int) -> Any:
    """FlashInfer's wrapper, with a plan of the step."""
    wrapper = library.BatchMLAPagedAttentionWrapper(
        torch.zeros(99, dtype=torch.uint8), backend="fa3"
    )
    tables = layout.qo_indptr, layout.kv_indptr, layout.kv_indices, layout.kv_len
    wrapper.plan(
        metadata=library.MLAPlanMetadata.csr(*(torch.from_numpy(each.copy()) for each in tables)),
        num_heads=heads,
        head_dim_ckv=LATENT,
        head_dim_kpe=TURNED,
        page_size=4,
        causal=True,
        sm_scale=0.1,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        query_layout="split",
        kv_cache_layout="split",
    )
    return wrapper


@pytest.mark.parametrize("step", [MIXED, DECODES], ids=str)
def test_the_module_is_given_what_flashinfers_own_wrapper_gives_it(
    library: ModuleType, module: Module, step: Paged
) -> None:
    layout = step.layout()
    made = make(16, torch.bfloat16, library=OnCpu(torch.device("cpu"), torch.bfloat16, ""))
    q, k = rows_of(made, layout.num_tokens)
    with torch.inference_mode():
        made.attention.plan(layout)
        out = made.attention.run(0, q, k, None, None)
    assert out.shape == (layout.num_tokens, 16, LATENT)
    keys = made.cache.keys[0][:, :, 0]
    wrapper = wrapper_plan(library, layout, 16)
    pairs = (q[..., TURNED:], q[..., :TURNED]), (keys[..., TURNED:], keys[..., :TURNED])
    wrapper.run(query=pairs[0], kv_cache=pairs[1], out=out)
    assert module.made[0] == module.made[1]
    for ours, theirs in (module.plans, [given[2:] for given in module.runs]):
        assert [*map(facts, ours)] == [*map(facts, theirs)]


def facts(given: object) -> object:
    """The contents of a table, the place of another tensor, or a number."""
    if not isinstance(given, Tensor):
        return given
    if given.dtype == torch.int32:
        return given.tolist()
    return given.dtype, given.data_ptr(), given.shape, given.stride()


def test_flashinfers_wrapper_rejects_prompts_with_heads_that_we_round_up(
    library: ModuleType, module: Module
) -> None:
    """With 20 heads the seventh row is in two tiles of 128; its last key, the 64th, begins one."""
    layout = Paged(((58, 20),), 4).layout()
    with pytest.raises(ValueError, match="native execution would omit a visible key"):
        wrapper_plan(library, layout, 20)
    wrapper_plan(library, layout, 32)
    made = make(20, torch.bfloat16, library=OnCpu(torch.device("cpu"), torch.bfloat16, ""))
    with torch.inference_mode():
        made.attention.plan(layout)
        out = made.attention.run(0, *rows_of(made, 20), None, None)
    assert out.shape == (20, 20, LATENT)
    assert [given[3] for given in module.plans] == [32, 32]
    query, _, _, _, _, found = module.runs[-1][3:9]
    assert query.shape == found.shape == (20, 32, LATENT)
