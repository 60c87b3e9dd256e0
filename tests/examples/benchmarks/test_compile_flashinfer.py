import importlib
import importlib.util
from pathlib import Path

import pytest

from engine.worker.cuda.build_environment import prepare_environment
from examples.benchmarks.gpu import compile_flashinfer

pytestmark = pytest.mark.examples


def test_a_module_compiles_for_hopper_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    if lacking := compile_flashinfer.missing():
        pytest.skip(lacking)
    prepare_environment(compile_flashinfer.CAPABILITY)
    smallest = importlib.import_module("flashinfer.jit.activation").gen_act_and_mul_module
    module = smallest("silu")
    assert compile_flashinfer.compile_objects(module) > 0
    assert all(each.stat().st_size > 0 for each in compile_flashinfer.objects(module))


def test_without_the_tools_the_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert compile_flashinfer.missing() == f"there is no nvcc in {tmp_path} (CUDA_HOME)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert compile_flashinfer.missing() == "flashinfer is not installed"
