"""Our calls match the signatures of the installed FlashInfer; skipped without it."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from adapters.attention.flashinfer import modules
from adapters.attention.flashinfer.backend import FlashInferAttention
from adapters.attention.flashinfer.library import FlashInfer
from adapters.attention.flashinfer.ports import DeviceEvent
from engine.worker.cpu.thread_pool import NativeThreadPool
from engine.worker.model.layout import blank_layout, padded
from engine.worker.ports import AttentionSpec, KVTensors, ModelShape
from tests.adapters.attention.flashinfer_cases import LIMITS, Made, Paged, make
from tests.attention_backends import gpu_cache
from tests.flashinfer_stand_in import StandIn


@pytest.fixture(scope="module")
def library() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module("flashinfer")
        except ImportError:
            pytest.skip("flashinfer is not installed")


@pytest.fixture(scope="module")
def made() -> Made:
    """A backend that has planned and run a step of each kind."""
    made = make(60, 4, has_decode_kernels=False)
    decodes = Paged(((7, 1), (30, 1)), 4).layout()
    made.attention.plan(decodes)
    run(made, 2)
    made.attention.plan_captured(padded(decodes, 4, spare_block=60))
    run(made, 4)
    return made


def run(made: Made, rows: int) -> None:
    made.stand_in.catch_up()
    q, k, v = torch.split(torch.ones((rows, 8, 8)), [4, 2, 2], dim=1)
    made.attention.run(0, q, k, v, None)


def check(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Every name is a parameter, and nothing that has no default is left out."""
    inspect.signature(function).bind(None, **given)
    known = inspect.signature(function).parameters
    assert given.keys() <= known.keys()


def test_mixed_steps_are_planned_and_run_as_the_prefill_wrapper_says(
    library: ModuleType, made: Made
) -> None:
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper
    check(wrapper.plan, made.last_plan("mixed"))
    check(wrapper.run, made.last_plan("run"))


def test_captured_steps_are_planned_and_run_as_the_decode_wrapper_says(
    library: ModuleType, made: Made
) -> None:
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper
    check(wrapper._plan_impl, made.last_plan("captured"))
    check(wrapper.run, made.last_plan("run"))
    check(wrapper.workspace_size, made.last_plan("workspace_size"))
    inspect.signature(wrapper.reset_workspace_buffer).bind(None, None, None)


def test_wrappers_are_made_and_heads_turned_as_their_signatures_say(library: ModuleType) -> None:
    captured = inspect.signature(library.BatchDecodeWithPagedKVCacheWrapper.__init__)
    buffers = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    flags = {"use_cuda_graph": True, "use_tensor_cores": True, "backend": "fa2"}
    captured.bind(None, None, "NHD", **dict.fromkeys(buffers), **flags)
    mixed = inspect.signature(library.BatchPrefillWithPagedKVCacheWrapper.__init__)
    mixed.bind(None, None, "NHD", backend="fa2")
    fixed = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    names = dict.fromkeys(f"{each}_buf" for each in fixed)
    mixed.bind(None, None, "NHD", use_cuda_graph=True, **names, backend="fa2")
    inspect.signature(library.BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer).bind(
        None, None, None
    )


class Kernels:
    """Stands in for a compiled module: the arguments that the wrappers' Python passes to it."""

    def __init__(self) -> None:
        self.modules: list[tuple[Any, ...]] = []  # what FlashInfer would compile
        self.plans: list[tuple[Any, ...]] = []
        self.runs: list[tuple[Any, ...]] = []

    def plan(self, *given: Any) -> list[int]:
        tables = [each.clone() for each in given[3:6]]  # in memory that later steps are written to
        self.plans.append((*given[:3], *tables, *given[6:]))
        return [1, 2, 3]

    def workspace_size(self, *given: Any) -> tuple[int, int]:
        return 1000, 2000

    def paged_run(self, *given: Any) -> None:
        self.runs.append(given)


class OnCpu(FlashInfer):
    """The library's wrappers without a GPU."""

    num_processors = 132

    def compile(self, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
        """Compile nothing."""

    def decode_kernels(self) -> None:
        """Decodes are FlashInfer's."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> DeviceEvent:
        return StandIn().event()


def asked(kernels: Kernels, *given: Any) -> Kernels:
    """Stands in for `get_batch_prefill_module`."""
    kernels.modules.append(given)
    return kernels


@pytest.fixture
def kernels(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    found, real = Kernels(), torch.zeros  # no kernel writes to it

    def empty(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made: torch.Tensor = real(*sizes, **options)
        return made

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    for module in (library.prefill, library.decode):
        monkeypatch.setattr(module, "get_batch_prefill_module", partial(asked, found))
    return found


def test_heads_with_sinks_that_are_narrower_than_a_kernels_reach_it(kernels: Kernels) -> None:
    """Keys of 80 numbers are read as 128, of which the others belong to the next head."""
    cache = gpu_cache(ModelShape(1, 4, 2, 80, 1, 1, 1, 1, 1), 60, 4, torch.bfloat16)
    spec = AttentionSpec(
        4, 2, 80, 0.125, None, torch.bfloat16, limits=LIMITS, has_sinks=True, cache_head_dim=80
    )
    attention = FlashInferAttention(
        spec, cache, NativeThreadPool(1), OnCpu(torch.device("cpu"), torch.bfloat16, "")
    )
    decodes = padded(Paged(((7, 1), (30, 1)), 4).layout(), 4, spare_block=60)
    prompt = Paged(((7, 1), (30, 3)), 4).layout()
    for plan, layout in ((attention.plan, prompt), (attention.plan_captured, decodes)):
        q, k, v = torch.split(torch.ones((4, 8, 80), dtype=torch.bfloat16), [4, 2, 2], dim=1)
        with torch.inference_mode():
            plan(layout)
            out = attention.run(0, q, k, v, None, torch.zeros(4))
        assert out.shape == (4, 4, 80)
        query, keys, values = kernels.runs[-1][3:6]
        assert query.shape == (4, 4, 128)
        assert torch.equal(query[..., :80], q)
        assert not query[..., 80:].any()
        assert keys.shape == values.shape == (61, 4, 2, 128)
        assert keys.stride() == values.stride() == (4 * 2 * 80 + 48, 2 * 80, 80, 1)
        sums = kernels.runs[-1][11]
        assert (sums.shape, sums.dtype) == ((4, 4), torch.float32)
    assert {module[5:7] for module in kernels.modules} == {(128, 128)}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_wrappers_hand_our_steps_down_to_their_kernels(
    kernels: Kernels, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = torch.zeros((2, 61, 4, 2, 64)).to(kv_dtype)
    spec = AttentionSpec(4, 2, 64, 0.125, 9, torch.bfloat16, limits=LIMITS)
    cache = KVTensors((pages[0],), (pages[1],), 1)
    attention = FlashInferAttention(
        spec, cache, NativeThreadPool(1), OnCpu(torch.device("cpu"), torch.bfloat16, "")
    )
    q, k, v = torch.split(torch.ones((4, 8, 64), dtype=torch.bfloat16), [4, 2, 2], dim=1)
    with torch.inference_mode():
        attention.plan(Paged(((7, 1), (30, 3)), 4).layout())
        attention.run(0, q, k, v, None)
        for seed in range(2):
            decodes = Paged(((7, 1), (30, 1)), 4, seed=seed).layout()
            baked = attention.plan_captured(padded(decodes, 4, spare_block=60))
            assert baked == (1, 2, 3)
            attention.run(0, q, k, v, None)
        blank = replace(blank_layout(8, 60, 4), num_decodes=0)
        q, k, v = torch.split(torch.ones((8, 8, 64), dtype=torch.bfloat16), [4, 2, 2], dim=1)
        for layout in (blank, padded(Paged(((7, 1), (30, 3)), 4).layout(), 8, spare_block=60)):
            assert attention.plan_captured(layout) == (1, 2, 3)
            attention.run(0, q, k, v, None)
    makes = importlib.import_module("flashinfer.jit.attention.modules")
    monkeypatch.setattr(makes, "_gen_batch_prefill_primary_module", lambda *given: given)
    compiled: Any = modules.attention_module(spec, kv_dtype, (9, 0))
    assert {compiled} == {*kernels.modules}
    *plans, blank_plan, in_graph = kernels.plans
    mixed, *captured = plans
    assert [given[3].tolist() for given in plans] == [[0, 1, 4], *[[0, 1, 2, 3, 4]] * 2]
    assert [given[4].tolist() for given in plans] == [[0, 2, 11], *[[0, 2, 10, 11, 12]] * 2]
    assert mixed[5].tolist() == [8, 33]
    assert [given[5].tolist() for given in captured] == [[8, 31, 1, 1]] * 2
    heads_and_graph = [given[8:12] for given in plans]
    assert heads_and_graph == [(4, 2, 4, False), (4, 2, 4, True), (4, 2, 4, True)]
    buffers = [tuple(each.data_ptr() for each in given[6:10]) for given in kernels.runs[1:]]
    assert buffers[0] == buffers[1], "a graph reads the same addresses in every replay"
    assert buffers[2] == buffers[3]
    assert in_graph[3].tolist() == [0, 1, 4, 5, 6, 7, 8, 8, 8]
    assert in_graph[4].tolist() == [0, 2, 11, 12, 13, 14, 15, 15, 15]
    assert in_graph[5].tolist() == [8, 33, 1, 1, 1, 1, 0, 0]
    assert blank_plan[6:12] == in_graph[6:12] == (8, 8, 4, 2, 4, True), "rows, requests, heads"
