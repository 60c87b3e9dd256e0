"""Sums with the residual stream are computed by the norm behind them, in all families that have
such norms, on one GPU and on ranks."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from engine.worker.cuda.device import CudaDevice
from engine.worker.cuda.kernels import reference
from engine.worker.cuda.kernels.library import TritonKernels
from engine.worker.cuda.model.kernels import FlashInferKernels
from engine.worker.cuda.model.residual import Pending, ResidualKernels, Summand
from engine.worker.process.worker import Worker
from tests.engine.worker.cuda.fleet import gpus
from tests.engine.worker.cuda.standing import StandingGpu, gpu_settings
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import make_checkpoint

PIECES = ((0, range(1, 20)), (1, (5,)), (0, (7,)))
# Sums of each family's three layers: in a norm behind, or in a post norm that no norm follows.
FAMILIES = {
    "llama": (0, 0),  # the GEMMs add
    "phi3": (0, 0),
    "gemma2": (5, 1),
    "gemma3": (5, 1),
    "olmo2": (0, 6),
    "mixtral": (2, 0),  # experts do not add by themselves
}


class CountedRows:
    """The module `kernels.rows`, computed by the reference."""

    MAX_WIDTH = 32768
    MAX_GATED_WIDTH = 16384

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        work = getattr(reference, name)

        def run(*args: Any) -> Any:
            self.calls.append(name)
            return work(*args)

        return run


def load(model: Path, rows: CountedRows | None, weights: str = "auto") -> Worker:
    """A worker on a stand-in for a GPU, with these kernels or without any."""
    settings = gpu_settings(model, dtype="float16", attention="auto", weights=weights)
    kernels = TritonKernels(
        rows=cast(Any, rows), quantization=cast(Any, rows) if weights == "int8" else None
    )
    device = CudaDevice(settings, StandingGpu(total_bytes=1 << 31), None, None, kernels)
    return Worker.load(settings, lambda what, done, total: None, device)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_the_same_with_sums_in_norms(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    rows = CountedRows()
    exact, plain = (Driver(each, seed=1) for each in (load_worker(tmp_path), load(tmp_path, None)))
    fused = Driver(load(tmp_path, rows), seed=1)
    for piece in PIECES:
        rows.calls.clear()
        logits, wanted, found = exact.logits(piece), plain.logits(piece), fused.logits(piece)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0.01 * float(wanted.std()))
        torch.testing.assert_close(found, logits, rtol=0, atol=0.03 * float(logits.std()))
        assert (rows.calls.count("add_norm"), rows.calls.count("add_rows")) == FAMILIES[family]


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_ranks_add_what_they_have_summed_in_the_norm_behind(tmp_path: Path, weights: str) -> None:
    make_checkpoint(tmp_path, "llama")
    counted = [CountedRows(), CountedRows()]
    changes = {"dtype": "float16", "attention": "auto", "weights": weights}
    eight = weights == "int8"
    kernels = [
        TritonKernels(rows=cast(Any, rows), quantization=cast(Any, rows) if eight else None)
        for rows in counted
    ]
    alone = Driver(load(tmp_path, None, weights), seed=1)
    with gpus(tmp_path, 1, 2, changes, kernels) as (workers, _):
        together = Driver(workers, seed=1)
        for piece in PIECES:
            for rows in counted:
                rows.calls.clear()
            wanted, found = alone.logits(piece), together.logits(piece)
            allowed = (0.2 if eight else 0.02) * float(wanted.std())
            torch.testing.assert_close(found, wanted, rtol=0, atol=allowed)
            name = "add_norm_and_quantize" if eight else "add_norm"
            assert [rows.calls.count(name) for rows in counted] == [5, 5]


def test_sums_without_a_post_norm_use_the_library_and_others_our_kernel() -> None:
    calls: list[str] = []

    def fused_add_rmsnorm(delta: Any, residual: Any, weight: Any, eps: float) -> None:
        calls.append("library")
        residual.add_(delta)
        reference.rms_norm(residual, weight, eps, delta)

    library = object.__new__(FlashInferKernels)
    library.package = cast(Any, SimpleNamespace)(fused_add_rmsnorm=fused_add_rmsnorm)
    rows = CountedRows()
    kernels = ResidualKernels(cast(Any, rows), library.add_norm)
    norm = reference.RowNorm(torch.rand(16).half(), 1e-5)
    narrow = reference.RowNorm(torch.rand(12).half(), 1e-5)  # no whole vectors
    for each, post in ((norm, None), (norm, norm), (narrow, None)):
        residual, delta = (
            torch.rand(3, len(each.weight)).half(),
            torch.rand(3, len(each.weight)).half(),
        )
        before = residual.clone()
        wanted = reference.add_norm(before, delta.clone(), each, post)
        found = kernels(residual, delta, each, post)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(residual, before)
    assert (calls, rows.calls) == (["library"], ["add_norm", "add_norm"])
    alone = ResidualKernels(None, library.add_norm)
    assert alone.supports(norm, None)
    assert not alone.supports(norm, norm)
    assert not alone.supports(narrow, None)


def test_a_summand_that_a_failed_step_left_is_replaced() -> None:
    pending, deltas = Pending(), torch.ones(2, 3)
    pending.put(Summand(deltas[:1], None))
    pending.put(Summand(deltas, None))
    assert pending.take().delta is deltas
    with pytest.raises(AssertionError, match="the sublayer runs before the norm"):
        pending.take()
