"""Requirements of GPU support: what is missing on this machine, in one line that says how to get
it."""

import ctypes
import importlib.util
import os
import shutil
from pathlib import Path

import torch

from engine.worker.cuda.wheel_toolkit import wheel_toolkit

INSTALL = "pip install 'podway[cuda]'"
SYSTEM = Path("/usr/local/cuda")


def missing(*, wants_kernels: bool) -> str:
    """The first missing requirement, empty if none; `wants_kernels`: whether FlashInfer is
    needed."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build of it with CUDA"
    if not _has_driver():
        return "there is no NVIDIA driver: libcuda.so.1 cannot be loaded"
    if torch.cuda.device_count() == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return f"there is a driver, but no GPU{hidden}"
    if wants_kernels:
        return missing_kernels()
    return ""


def missing_kernels() -> str:
    """The first missing requirement of FlashInfer, empty if none."""
    if importlib.util.find_spec("flashinfer") is None:
        return f"flashinfer is not installed ({INSTALL})"
    if nvcc() is None and not has_cached_kernels():
        return (
            "flashinfer compiles its kernels at the first start and there is no nvcc in "
            f"{cuda_home()}: {INSTALL} brings one; or set CUDA_HOME to a CUDA toolkit, or copy "
            f"compiled kernels of another machine to {kernel_cache()}"
        )
    return ""


def nvcc() -> Path | None:
    """The CUDA compiler, searched for where FlashInfer searches."""
    found = cuda_home() / "bin" / "nvcc"
    return found if found.is_file() else None


def cuda_home() -> Path:
    """The folder of the CUDA toolkit, which may not exist: named by a variable, that of the nvcc
    in PATH, the system's, or NVIDIA's wheels."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is not None:
        return Path(home)
    if (compiler := shutil.which("nvcc")) is not None:
        return Path(compiler).resolve().parents[1]
    wheels = wheel_toolkit()
    return wheels if wheels is not None and not SYSTEM.is_dir() else SYSTEM


def kernel_cache() -> Path:
    """FlashInfer's cache of compiled kernels."""
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    return (Path(base) if base else Path.home()) / ".cache" / "flashinfer"


def has_cached_kernels() -> bool:
    """Whether compiled kernels exist, in the cache or in an installed ahead-of-time package."""
    if any(kernel_cache().glob("*/*/cached_ops/*/*.so")):
        return True
    found = importlib.util.find_spec("flashinfer")
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    return any(any(Path(folder).glob("data/aot/*/*.so")) for folder in folders)


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
