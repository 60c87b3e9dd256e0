"""A kernel that is compiled now and one that is loaded from the cache compute the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import ctypes, hashlib, torch
from engine.worker.cpu.build import kernel
from engine.worker.cpu.kernels import elementwise

x = torch.randn(64, 896, generator=torch.Generator().manual_seed(1))
y = torch.empty_like(x)
compiled = kernel(elementwise.activation)
run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(compiled.address)
operands = elementwise.ActivationOperands(
    function=elementwise.GELU, x=x.data_ptr(), x_stride=896, y=y.data_ptr(), y_stride=896,
    rows=64, width=896, rows_per_chunk=64)
run(ctypes.addressof(operands), 0, 0)
print(compiled.cache_hits, hashlib.sha256(y.numpy().tobytes()).hexdigest())
"""


@pytest.mark.process
def test_a_cached_kernel_has_the_bits_of_one_that_was_just_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    outputs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    (was_cached, compiled), (is_cached, loaded) = (each.split() for each in outputs)
    assert (was_cached, is_cached) == ("0", "1")
    assert compiled == loaded
