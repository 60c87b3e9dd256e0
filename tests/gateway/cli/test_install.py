"""Which build of PyTorch `make serve` downloads, and what it says before."""

import platform

import pytest

from gateway.install import CPU_INDEX, NoCpuBuild, choose_index, pinned_version

ONLY_CUDA = "Available versions: 2.13.0, 2.12.1"
BOTH = "Available versions: 2.13.0+cpu, 2.13.0"
ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="PyPI's wheel has no CUDA here")


def pypi(index: str) -> str:
    """Only builds with CUDA, and the CPU builds on PyTorch's index."""
    return BOTH if index == CPU_INDEX else ONLY_CUDA


def fails(index: str) -> str:
    raise AssertionError("pip was asked although the choice was clear")


def test_a_named_index_is_used_without_a_question() -> None:
    assert choose_index("2.13.0", "https://h/cpu", False, fails)[0] == "https://h/cpu"
    assert choose_index("2.13.0", "none", False, fails)[0] == ""


def test_with_a_driver_the_size_of_the_cuda_build_is_printed_first() -> None:
    index, line = choose_index("2.13.0", "", True, fails)
    assert index == ""
    assert "several GB" in line
    assert f"TORCH_INDEX={CPU_INDEX}" in line


@ON_X86
def test_without_a_driver_the_cpu_build_is_taken_from_where_it_is() -> None:
    index, line = choose_index("2.13.0", "", False, pypi)
    assert index == CPU_INDEX
    assert line.startswith("No NVIDIA driver found: PyTorch 2.13.0 for CPUs")
    assert choose_index("2.13.0", "", False, lambda index: BOTH)[0] == ""


@ON_X86
def test_without_a_driver_the_cuda_build_is_never_a_surprise() -> None:
    with pytest.raises(NoCpuBuild, match="TORCH_INDEX=none"):
        choose_index("2.13.0", "", False, lambda index: ONLY_CUDA)


def test_the_version_is_the_one_that_pyproject_pins() -> None:
    assert pinned_version().count(".") == 2
