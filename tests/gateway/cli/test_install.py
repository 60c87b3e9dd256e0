import platform
import tomllib

import pytest
from packaging.requirements import Requirement

from gateway.install import (
    CONSTRAINTS,
    CPU_INDEX,
    PIP,
    ROOT,
    NoCpuBuild,
    choose_index,
    main,
    pinned_version,
)

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


def test_the_constraints_pin_a_version_that_pyproject_accepts() -> None:
    version = pinned_version()
    assert version.count(".") == 2
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "torch")
    assert torch.specifier.contains(version)
    assert torch.specifier.contains("2.15.0"), "other versions are not shut out"


def test_pip_gets_the_constraints_and_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr("gateway.install.is_installed", lambda version: True)
    monkeypatch.setattr("sys.argv", ["install.py", "dev"])

    def call(command: list[str]) -> int:
        commands.append(command)
        return 0

    monkeypatch.setattr("subprocess.call", call)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert commands == [
        [*PIP, "install", "--constraint", str(CONSTRAINTS), "--editable", f"{ROOT}[dev]"]
    ]
