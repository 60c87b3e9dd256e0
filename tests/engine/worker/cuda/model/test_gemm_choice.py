import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.worker.cuda.choice_file import ChoiceFile, KernelTrials, file_of
from engine.worker.cuda.kernels.tiling import Tiling
from engine.worker.cuda.model import gemm_choice
from engine.worker.cuda.model.gemm_choice import (
    FIXED,
    FIXED_TILING,
    TILINGS,
    TORCH,
    MeasuredTilings,
)

FAST = TILINGS[3]
TRIALS = KernelTrials(ChoiceFile(None), lambda: None)


class Clock:
    """Products that take as long as the table says, with one kernel the fastest for 64 rows."""

    def __init__(self, fastest: Tiling | str = FAST) -> None:
        self.fastest = fastest
        self.now = 0.0
        self.num_products = 0

    def product(self, x: Tensor, weight: Tensor, kernel: Tiling | str) -> None:
        self.num_products += 1
        slow = 2.0 if kernel == TORCH or len(x) != 64 else 3.0
        self.now += 1.0 if kernel == self.fastest and len(x) == 64 else slow

    def seconds(self, work: Callable[[], object]) -> float:
        began = self.now
        work()
        return self.now - began


def choice(path: Path | None, clock: Clock) -> tuple[MeasuredTilings, Tensor]:
    found, weight = MeasuredTilings(path), torch.ones(48, 32, dtype=torch.bfloat16)
    found.register(weight)
    found.measure(clock.product, clock.seconds, TRIALS)
    return found, weight


def test_the_fastest_kernel_is_used_for_up_to_so_many_rows(tmp_path: Path) -> None:
    found, weight = choice(tmp_path / "gpu.json", Clock())
    chosen = [found.tiling(rows, weight) for rows in (1, 16, 17, 64, 65)]
    assert chosen == [None, None, FAST, FAST, None]
    assert found.tiling(64, torch.ones(7, 32, dtype=torch.bfloat16)) is None


def test_later_starts_use_the_file_and_measure_nothing(tmp_path: Path) -> None:
    path = tmp_path / "gemm" / "gpu.json"
    choice(path, Clock())
    assert json.loads(path.read_text()) == {
        "16 rows, 48 x 32 bfloat16": "torch",
        "64 rows, 48 x 32 bfloat16": str(FAST),
    }
    clock = Clock()
    found, weight = choice(path, clock)
    assert clock.num_products == 0
    assert found.tiling(64, weight) == FAST


@pytest.mark.parametrize("text", ["{", "[]", '{"64 rows, 48 x 32 bfloat16": "1x2x3"}'])
def test_a_file_that_is_damaged_or_names_unknown_tilings_is_measured_again(
    tmp_path: Path, text: str
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(text)
    found, weight = choice(path, Clock())
    assert found.tiling(64, weight) == FAST


def test_a_tiling_that_does_not_compile_is_named_and_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Clock):
        def product(self, x: Tensor, weight: Tensor, kernel: Tiling | str) -> None:
            if kernel == FAST:
                raise RuntimeError("out of shared memory\nand more")
            super().product(x, weight, kernel)

    found, weight = choice(None, Broken())
    assert found.tiling(64, weight) is None
    assert f"GEMM kernel {FAST} is not used: out of shared memory" in caplog.messages


def test_batch_invariant_products_have_one_tiling_whatever_the_number_of_rows() -> None:
    weight = torch.ones(48, 32)
    assert {FIXED_TILING.tiling(rows, weight) for rows in (1, 64, 5000)} == {FIXED}


def test_the_file_is_named_by_the_gpu_and_torch(tmp_path: Path) -> None:
    assert file_of("", "NVIDIA H200") is None
    path = file_of(str(tmp_path), "NVIDIA H200", "torch", "2.13.0")
    assert path == tmp_path / "nvidia-h200-torch-2-13-0.json"
    assert gemm_choice.FIXED in TILINGS
