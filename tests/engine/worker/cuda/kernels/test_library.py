"""Kernels are verified before they are used, and those that fail are replaced by torch."""

import logging

import pytest
import torch

from engine.worker.cuda.kernels import library
from tests.engine.worker.cuda.kernels.interpreted import interpreted

rows = interpreted("rows")


@pytest.fixture(autouse=True)
def fresh() -> None:
    library.load.cache_clear()


CPU = torch.device("cpu")


def test_all_kernels_pass_their_trials(caplog: pytest.LogCaptureFixture) -> None:
    # float16: the interpreter's products do not support bfloat16
    kernels = library.load(CPU, torch.float16)
    assert caplog.messages == []
    assert None not in [getattr(kernels, name) for name in library.TRIALS]


def test_a_kernel_that_computes_something_else_is_not_used_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        rows, "norm_and_quantize", lambda x, weight, eps, dtype: rows.quantize_rows(x, dtype)
    )
    kernels = library.load(CPU, torch.float16)
    assert kernels.rows is None
    assert kernels.gemm is not None
    assert kernels.fp8_weights is not None
    (line,) = caplog.messages
    assert line.startswith("Triton kernel rows is not used, torch takes its place: quant")


def test_a_kernel_that_does_not_compile_is_not_used_and_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("ptxas failed\nwith a long report")

    monkeypatch.setattr(rows, "quantize_rows", fails)
    with caplog.at_level(logging.WARNING):
        kernels = library.load(CPU, torch.float16)
    assert kernels.rows is None
    assert caplog.messages == [
        "Triton kernel rows is not used, torch takes its place: ptxas failed"
    ]
