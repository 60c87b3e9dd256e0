"""Install Podway into this environment, after saying which build of PyTorch is downloaded.

    python gateway/install.py [EXTRA ...]      what the Makefile runs; standard library only

PyPI's Linux wheels of PyTorch contain CUDA, a download of several GB. Where there is no NVIDIA
driver, PyTorch's index of CPU builds is used. TORCH_INDEX=URL names another index, and
TORCH_INDEX=none leaves the choice to pip's own settings.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


class NoCpuBuild(Exception):
    """Only a build with CUDA can be installed, and nothing shows that it is wanted."""


def choose_index(
    version: str, setting: str, has_driver: bool, offers: Callable[[str], str]
) -> tuple[str, str]:
    """The extra index that pip needs ("" for none), and a line for the user.

    `offers` returns pip's list of PyTorch versions, with an extra index or "". Raises `NoCpuBuild`.
    """
    if setting == "none":
        return "", f"PyTorch {version}: the build that pip's own settings give."
    if setting:
        return setting, f"PyTorch {version} from {setting}."
    if has_driver:
        hint = f"TORCH_INDEX={CPU_INDEX} gives the CPU build"
        return "", f"NVIDIA driver found: PyTorch {version} with CUDA, several GB ({hint})."
    found = f"No NVIDIA driver found: PyTorch {version} for CPUs, about 200 MB"
    if platform.machine() != "x86_64" or f"{version}+cpu" in offers(""):
        return "", found + "."
    if f"{version}+cpu" in offers(CPU_INDEX):
        return CPU_INDEX, f"{found}, from {CPU_INDEX}."
    raise NoCpuBuild(
        f"No NVIDIA driver found, and {CPU_INDEX} has no PyTorch {version} for CPUs or is not "
        "reachable.\nName an index of CPU builds with TORCH_INDEX=URL, or accept the CUDA build, "
        "several GB, with TORCH_INDEX=none."
    )


def offered(index: str) -> str:
    """What pip says about the versions of PyTorch, without a download."""
    extra = ["--extra-index-url", index] if index else []
    command = [*PIP, "index", "versions", "torch", "--retries", "1", "--timeout", "10", *extra]
    return subprocess.run(command, capture_output=True, text=True).stdout


def pinned_version() -> str:
    """The version of PyTorch that the constraints name."""
    lines = CONSTRAINTS.read_text().splitlines()
    (pin,) = (line for line in lines if line.startswith("torch=="))
    return pin.removeprefix("torch==")


def has_nvidia_driver() -> bool:
    """Also in WSL, where the driver is Windows' and only its command is in Linux."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def is_installed(version: str) -> bool:
    """Whether this environment has that PyTorch already, in any build."""
    try:
        return metadata.version("torch").partition("+")[0] == version
    except metadata.PackageNotFoundError:
        return False


def main() -> None:
    """Say what is downloaded, then let pip do it, with its own progress."""
    version, index = pinned_version(), ""
    if not is_installed(version):
        setting = os.environ.get("TORCH_INDEX", "")
        try:
            index, line = choose_index(version, setting, has_nvidia_driver(), offered)
        except NoCpuBuild as error:
            sys.exit(str(error))
        print(line, flush=True)
    extras = ",".join(sys.argv[1:])
    package = f"{ROOT}[{extras}]" if extras else str(ROOT)
    options = ["--constraint", str(CONSTRAINTS)]
    options += ["--extra-index-url", index] if index else []
    sys.exit(subprocess.call([*PIP, "install", *options, "--editable", package]))


if __name__ == "__main__":
    main()
