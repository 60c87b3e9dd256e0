"""What we call FlashInfer with is what the installed FlashInfer takes; skips where it is not."""

import importlib
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.worker.layout import padded
from tests.adapters.attention.flashinfer_cases import Made, Paged, make


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
    made = make(60, 4)
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
    turn = inspect.signature(library.apply_rope_with_cos_sin_cache_inplace)
    names = ["positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"]
    assert list(turn.parameters) == names
