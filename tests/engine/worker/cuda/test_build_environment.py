import os
from pathlib import Path

import pytest

from engine.worker.cuda import build_environment, requirements
from engine.worker.cuda.build_environment import prepare_environment
from engine.worker.cuda.wheel_toolkit import assembled


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A CUDA toolkit in `cuda`, wheels in `site`, no driver."""
    found = {"CUDA_HOME": str(tmp_path / "cuda")}
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path / "site")])
    monkeypatch.setattr(build_environment, "_loaded_driver", lambda: None)
    monkeypatch.setattr(build_environment, "kernel_cache", lambda: tmp_path / "cache")
    return found


def header(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(("capability", "named"), [((9, 0), "9.0a"), ((8, 6), "8.6")])
def test_the_architecture_is_named_downloads_are_forbidden_and_set_variables_are_kept(
    capability: tuple[int, int], named: str, environ: dict[str, str], tmp_path: Path
) -> None:
    prepare_environment(capability)
    assert {name: value for name, value in environ.items() if "PYTEST" not in name} == {
        "CUDA_HOME": str(tmp_path / "cuda"),
        "FLASHINFER_CUDA_ARCH_LIST": named,
        "FLASHINFER_NO_DOWNLOAD": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    environ["FLASHINFER_CUDA_ARCH_LIST"] = "8.0"
    prepare_environment(capability)
    assert environ["FLASHINFER_CUDA_ARCH_LIST"] == "8.0"


def test_the_driver_library_is_linked_from_stubs_or_by_a_link_to_the_driver(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "driver" / "libcuda.so.1"
    header(driver.parent, driver.name)
    monkeypatch.setattr(build_environment, "_loaded_driver", lambda: driver)
    prepare_environment((9, 0))
    link = Path(environ["FLASHINFER_EXTRA_LDFLAGS"].removeprefix("-L")) / "libcuda.so"
    assert link.resolve() == driver
    del environ["FLASHINFER_EXTRA_LDFLAGS"]
    stubs = header(tmp_path / "cuda" / "lib64" / "stubs", "libcuda.so")
    prepare_environment((9, 0))
    assert environ["FLASHINFER_EXTRA_LDFLAGS"] == f"-L{stubs}"


def wheels(site: Path) -> Path:
    """The files that NVIDIA's wheels of a CUDA compiler unpack, as far as links need them."""
    folder = site / "nvidia" / "cu13"
    header(folder / "include", "cuda_runtime.h")
    header(folder / "bin", "nvcc", "ptxas")
    header(folder / "nvvm" / "bin", "cicc")
    header(folder / "lib", "libcudart.so.13", "libcudart_static.a")
    return folder


def test_without_a_toolkit_the_one_in_the_wheels_is_used(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "SYSTEM", tmp_path / "none")
    del environ["CUDA_HOME"]
    environ["PATH"] = ""
    assert requirements.nvcc() is None
    folder = wheels(tmp_path / "site")
    assert requirements.nvcc() == folder / "bin" / "nvcc"
    prepare_environment((9, 0))
    home = Path(environ["CUDA_HOME"])
    assert home.is_relative_to(tmp_path / "cache")
    for name in ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc", "include/cuda_runtime.h"):
        assert (home / name).samefile(folder / name)
    library = folder / "lib" / "libcudart.so.13"
    assert (home / "lib64" / "libcudart.so").samefile(library)
    assert (home / "lib64" / "libcudart.so.13").samefile(library)
    assert (home / "lib64" / "libcudart_static.a").is_file()
    assert requirements.nvcc() == home / "bin" / "nvcc"


def test_the_links_to_the_wheels_follow_an_upgrade(tmp_path: Path) -> None:
    folder = wheels(tmp_path / "site")
    home = assembled(folder, tmp_path / "cache")
    (folder / "lib" / "libcudart.so.13").rename(folder / "lib" / "libcudart.so.14")
    assert assembled(folder, tmp_path / "cache") == home
    assert {each.name for each in (home / "lib64").iterdir()} == {
        "libcudart.so", "libcudart.so.14", "libcudart_static.a"
    }  # fmt: skip
    assert (home / "lib64" / "libcudart.so").is_file()


@pytest.mark.parametrize("kind", ["variable", "path", "system"])
def test_a_toolkit_of_the_machine_is_preferred_to_the_wheels(
    kind: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels(tmp_path / "site")
    toolkit = tmp_path / "toolkit"
    header(toolkit / "bin", "nvcc").joinpath("nvcc").chmod(0o755)
    monkeypatch.setattr(requirements, "SYSTEM", toolkit if kind == "system" else tmp_path / "none")
    environ["PATH"] = str(toolkit / "bin") if kind == "path" else ""
    environ["CUDA_HOME"] = str(toolkit)
    if kind != "variable":
        del environ["CUDA_HOME"]
    prepare_environment((9, 0))
    assert requirements.cuda_home() == toolkit
    assert environ.get("CUDA_HOME") in (None, str(toolkit))
