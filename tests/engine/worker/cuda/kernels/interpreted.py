"""Kernels under Triton's interpreter, on tensors of the CPU."""

import importlib
import os
from types import ModuleType

import pytest

PACKAGE = "engine.worker.cuda.kernels"


def interpreted(name: str) -> ModuleType:
    """A module of the kernels' package; the test module is skipped without the interpreter.

    `tests/conftest.py` switches the interpreter on before any kernel is imported.
    """
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: tests/gpu runs the compiled kernels", allow_module_level=True)
    return importlib.import_module(f"{PACKAGE}.{name}")
