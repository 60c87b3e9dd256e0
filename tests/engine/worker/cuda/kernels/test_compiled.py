"""Every Triton kernel is compiled for Hopper (sm_90a), which needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.running import ROOT

MAX_REGISTERS = 168  # of a thread: three thread blocks of 128 threads on a multiprocessor
MOST_OF_64_ROWS = 255  # two; products of 64 rows and groups of 32 are bound by arithmetic


@pytest.mark.process
def test_all_kernels_compile_for_hopper_spill_no_registers_and_wait_for_the_one_before(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Triton keeps what it has compiled, by its source: only changed kernels take long."""
    pytest.importorskip("triton", reason="triton is not installed")
    path = tmp_path / "kernels.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    assert pytestconfig.cache is not None
    kept = str(pytestconfig.cache.mkdir("triton"))
    command = [sys.executable, "-m", "examples.benchmarks.gpu.compile_kernels", "--json", str(path)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": kept},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {each["name"]: each for each in json.loads(path.read_text())}
    kernels = {name.split()[0] for name in found}
    assert kernels == {
        "rope_and_cache_write", "norm", "gate", "silu", "quantize", "product", "product_with_fp8",
        "add", "unpack", "sample", "merge_parts", "attend_decodes",
        "convolve", "scan", "gated_norm", "lora", "route", "sort", "sum",
    }  # fmt: skip
    for each in found.values():
        assert each["stack_bytes"] == 0, each
        is_of_64_rows = (
            each["name"].startswith(("product int4", "product mxfp4")) and " 64x" in each["name"]
        )
        assert each["registers"] <= (MOST_OF_64_ROWS if is_of_64_rows else MAX_REGISTERS), each
        assert each["shared_bytes"] <= 227 << 10, each
        assert each["waits_first"] == (not each["name"].startswith("sample")), each
