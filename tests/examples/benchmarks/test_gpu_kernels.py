"""FlashInfer's modules, built for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.worker.cuda.requirements import cuda_home, missing_kernels
from tests.examples.running import ROOT

pytestmark = pytest.mark.examples

# The program with FlashInfer's smallest module, in place of those that take minutes.
SMALLEST = """
import sys
from importlib import import_module
from examples.benchmarks.gpu import kernels
make = import_module("flashinfer.jit.activation").gen_act_and_mul_module
kernels.specs = lambda *_: [make("silu")]
sys.exit(kernels.main())
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words, "--capability", "9.0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def test_a_module_is_built_for_hopper_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    if lacking := missing_kernels():
        pytest.skip(lacking)
    if not any(cuda_home().glob("lib*/libcudart.so*")):
        pytest.skip(f"there is no library to link with in {cuda_home()} (CUDA_HOME)")
    ended = run("-c", SMALLEST, "--copy-to", str(tmp_path / "kernels"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (library,) = (tmp_path / "kernels").glob("*/*.so")
    assert library.stem == library.parent.name == "silu_and_mul"
    data = library.read_bytes()
    assert data.startswith(b"\x7fELF")
    assert b".nv_fatbin" in data, "code for a GPU"
    (commands,) = tmp_path.rglob("build.ninja")
    assert "arch=compute_90a,code=sm_90a" in commands.read_text()


def test_without_the_tools_the_missing_one_is_named(tmp_path: Path) -> None:
    folder = str(tmp_path)
    module = "examples.benchmarks.gpu.kernels"
    ended = run("-m", module, CUDA_HOME=folder, FLASHINFER_WORKSPACE_BASE=folder)
    assert ended.returncode == 1
    assert ended.stderr.startswith("FlashInfer's modules cannot be built here: flashinfer ")
    assert len(ended.stderr.splitlines()) == 1
