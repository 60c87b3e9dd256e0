"""Slims a FlashInfer wheel to what its imports and builds need, and adds built kernels.

python slim_flashinfer.py IN.whl OUT_DIR [KERNELS_DIR]

Kernels at KERNELS_DIR/NAME/NAME.so are installed as ahead-of-time kernels. With them the wheel has
nothing that only compilers read, so that no others can be built.
"""

import base64
import hashlib
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

DATA = "flashinfer/data/"
CUTLASS = (DATA + "cutlass/include/", DATA + "cutlass/tools/util/include/")
# What imports and ahead-of-time kernels do not need: headers, and sources of other kernels.
COMPILED = re.compile(
    f"{DATA}(cutlass|cccl)/|flashinfer/moe_ep/kernel_src/"
    f"|{DATA}csrc/[^/]*(sm100|sm120|nvfp4|mxfp8|fp4|moe)"
)


def is_needed(name: str, *, compiles: bool) -> bool:
    """Whether a file of the wheel is imported, or compiled into modules that Podway uses."""
    if not compiles and COMPILED.match(name):
        return False
    if name.startswith(DATA + "csrc/"):
        return "/" not in name.removeprefix(DATA + "csrc/")
    if name.startswith(DATA + "cutlass/"):
        return name.startswith(CUTLASS)
    if name.startswith(DATA + "cccl/"):
        return not any(part in name for part in ("/python/", "/test/", "/benchmarks/"))
    return True


def contents(wheel: zipfile.ZipFile, kernels: Path | None) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the new wheel, without its record."""
    built = sorted(kernels.glob("*/*.so")) if kernels else []
    for name in wheel.namelist():
        is_content = not name.endswith(("/", ".dist-info/RECORD"))
        if is_content and is_needed(name, compiles=not built):
            yield name, wheel.read(name)
    for library in built:
        yield f"{DATA}aot/{library.parent.name}/{library.name}", library.read_bytes()


def slim(source: Path, folder: Path, kernels: Path | None) -> Path:
    """Write the new wheel with its record; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    rows = []
    with (
        zipfile.ZipFile(source) as wheel,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as made,
    ):
        record = next(name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
        for name, data in contents(wheel, kernels):
            made.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
            rows.append(f"{name},sha256={digest.decode()},{len(data)}\n")
        made.writestr(record, "".join(rows) + f"{record},,\n")
    return target


if __name__ == "__main__":
    built = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    made_wheel = slim(Path(sys.argv[1]), Path(sys.argv[2]), built)
    print(f"{made_wheel}: {made_wheel.stat().st_size / 1e6:.0f} MB")
