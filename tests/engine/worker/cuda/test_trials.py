from pathlib import Path

import pytest

from engine.errors import KernelFaulted, WorkerLost
from engine.worker.cuda.choice_file import ChoiceFile, KernelTrials


class Gpu:
    """A GPU that can be made to fail all later work."""

    def __init__(self) -> None:
        self.fault = ""

    def synchronize(self) -> None:
        if self.fault:
            raise WorkerLost(self.fault)


def trials(path: Path | None, gpu: Gpu | None = None) -> KernelTrials:
    """The trials of one process."""
    return KernelTrials(ChoiceFile(path), (gpu or Gpu()).synchronize)


@pytest.mark.parametrize("raises", [False, True])
def test_a_fault_is_noted_for_later_processes(tmp_path: Path, raises: bool) -> None:
    path, gpu = tmp_path / "trials.json", Gpu()

    def run_kernel() -> None:
        with trials(path, gpu).trial("gemm", "--flag"):
            gpu.fault = "illegal address"
            if raises:
                raise RuntimeError("launch failed")

    with pytest.raises(KernelFaulted, match="'gemm' made the GPU fault: illegal address; --flag"):
        run_kernel()
    assert trials(path).excluded("gemm").startswith("it made the GPU fault")
    assert not trials(path).excluded("rows")


def test_an_error_that_leaves_the_gpu_usable_passes_and_is_not_noted(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    with pytest.raises(RuntimeError, match="nvcc"), trials(path).trial("gemm", "--flag"):
        raise RuntimeError("nvcc failed")
    assert not trials(path).excluded("gemm")


def test_two_processes_that_end_in_a_trial_exclude_the_kernel_and_one_does_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trials.json"
    for excluded in (False, False, True):
        process = trials(path)
        assert bool(process.excluded("rows")) == excluded
        if not excluded:
            process.trial("rows", "--flag").__enter__()  # and the process ends
    assert trials(path).excluded("rows").startswith("2 worker processes ended while they tried it")


def test_a_trial_that_ends_well_forgets_an_unfinished_one(tmp_path: Path) -> None:
    path = tmp_path / "trials.json"
    trials(path).trial("rows", "--flag").__enter__()
    with trials(path).trial("rows", "--flag"):
        pass
    trials(path).trial("rows", "--flag").__enter__()
    assert not trials(path).excluded("rows")


def test_notes_of_other_workers_are_kept(tmp_path: Path) -> None:
    path, gpu = tmp_path / "trials.json", Gpu()
    first, second = trials(path), trials(path, gpu)
    with pytest.raises(KernelFaulted), second.trial("gemm", "--flag"):
        gpu.fault = "illegal address"
    with first.trial("rows", "--flag"):
        pass
    assert trials(path).excluded("gemm")
