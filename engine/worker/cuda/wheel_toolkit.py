"""A CUDA toolkit made of NVIDIA's wheels, which `pip install 'podway[cuda]'` brings.

The wheels unpack into one folder, `nvidia/cu13` beside torch, with `bin`, `include`, `nvvm` and
`lib`. Programs that compile look for libraries in `lib64`, and link names without a version. So
`assembled` makes a folder with all of these names, which are links into the wheels.
"""

import contextlib
import hashlib
import os
import site
from pathlib import Path

SHARED = ("bin", "include", "nvvm")


def wheel_folders() -> list[Path]:
    """The folders of NVIDIA's wheels, such as `nvidia/cu13`, the newest CUDA first."""
    return [
        folder
        for packages in site.getsitepackages()
        for folder in sorted(Path(packages).glob("nvidia/*"), reverse=True)
        if folder.is_dir()
    ]


def wheel_toolkit() -> Path | None:
    """The folder of the wheels with a CUDA compiler; None if none is installed."""
    return next((each for each in wheel_folders() if (each / "bin" / "nvcc").is_file()), None)


def assembled(wheels: Path, cache: Path) -> Path:
    """A toolkit below `cache` that consists of links to the folder of wheels.

    Several processes may assemble it at the same time. Libraries that the wheels no longer have
    lose their links.
    """
    digest = hashlib.sha256(str(wheels).encode()).hexdigest()[:12]
    toolkit = cache / "toolkits" / digest
    libraries = toolkit / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in SHARED:
        _link(toolkit / name, wheels / name)
    for link in libraries.iterdir():
        if not link.exists():
            link.unlink(missing_ok=True)
    for file in sorted((wheels / "lib").iterdir()):
        _link(libraries / file.name, file)
        name, so, _ = file.name.partition(".so.")
        if so:
            _link(libraries / f"{name}.so", file)
    return toolkit


def _link(link: Path, target: Path) -> None:
    """Make `link` a link to `target`, in one step."""
    with contextlib.suppress(OSError):
        if link.readlink() == target:
            return
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)
