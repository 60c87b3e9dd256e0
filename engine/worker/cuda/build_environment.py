"""The environment in which FlashInfer and Triton compile their kernels.

FlashInfer reads these variables when it is imported. Variables that the operator has set are kept.
Without a CUDA toolkit the one in NVIDIA's wheels is used (`wheel_toolkit`). The driver library
`libcuda.so`, which every module links, is found or linked to the driver's.
"""

import ctypes
import os
from pathlib import Path

from engine.worker.cuda.requirements import cuda_home, kernel_cache
from engine.worker.cuda.wheel_toolkit import assembled, wheel_toolkit

DRIVER = "libcuda.so"


def prepare_environment(capability: tuple[int, int]) -> None:
    """Name the toolkit and the GPU architecture, forbid downloads, and add library folders."""
    if (wheels := wheel_toolkit()) is not None and cuda_home() == wheels:
        os.environ["CUDA_HOME"] = str(assembled(wheels, kernel_cache()))
    major, minor = capability
    suffix = "a" if major >= 9 else ""
    wanted = {
        "FLASHINFER_CUDA_ARCH_LIST": f"{major}.{minor}{suffix}",
        "FLASHINFER_NO_DOWNLOAD": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",  # its default differs between versions, and so would bits
        "FLASHINFER_EXTRA_LDFLAGS": " ".join(f"-L{each}" for each in driver_folders()),
    }
    for name, value in wanted.items():
        if value:
            os.environ.setdefault(name, value)


def driver_folders() -> list[Path]:
    """Folders with a `libcuda.so` to link: the toolkit's stubs, or a link to the driver's
    library."""
    stubs = cuda_home() / "lib64" / "stubs"
    if (stubs / DRIVER).is_file():
        return [stubs]
    loaded = _loaded_driver()
    if loaded is None or (loaded.parent / DRIVER).exists():
        return []
    folder = kernel_cache() / "driver"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / DRIVER
    if not link.exists():
        link.unlink(missing_ok=True)
        link.symlink_to(loaded)
    return [folder]


def _loaded_driver() -> Path | None:
    """The file of the driver library in this process; None without a driver."""
    try:
        ctypes.CDLL(f"{DRIVER}.1")
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if DRIVER in line)
    return next((Path(each) for each in paths), None)
