"""The headers of safetensors files: names, dtypes and shapes of tensors, without their contents.

A file is 8 bytes with the length of its header, the header in JSON, and the tensors.
"""

import json
from pathlib import Path
from typing import NamedTuple

from engine.errors import StartupError

INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the library's limit
# What reading JSON of another shape than the expected one raises.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)


class TensorHeader(NamedTuple):
    """What a file says about a tensor before its contents."""

    dtype: str
    shape: tuple[int, ...]


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint directory by name. Raises `StartupError`."""
    return {name: header for name, (_, header) in _located(directory).items()}


def shards_of(directory: Path) -> dict[str, Path]:
    """The file of each tensor by its name. Raises `StartupError`."""
    return {name: path for name, (path, _) in _located(directory).items()}


def _located(directory: Path) -> dict[str, tuple[Path, TensorHeader]]:
    index = directory / INDEX
    if index.is_file():
        return _indexed(index)
    files = sorted(directory.glob("*.safetensors"))
    single = directory / "model.safetensors"
    if single in files:
        files = [single]
    if not files:
        others = sorted([*directory.glob("*.bin"), *directory.glob("*.pth")])
        found = (
            f", only {others[0].name}; weights are read from safetensors only: load it in "
            "transformers and call save_pretrained, which writes them"
            if others
            else "; weights are read from safetensors only"
        )
        raise StartupError(f"{directory} has no *.safetensors file{found}")
    headers = {path: read_header(path) for path in files}
    return {name: (path, each[name]) for path, each in headers.items() for name in each}


def read_header(path: Path) -> dict[str, TensorHeader]:
    """The tensors of one file by name. Raises `StartupError`, also if the file is truncated."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            size = file.seek(0, 2) - LENGTH_BYTES
            if not 0 < length <= min(size, MAX_HEADER_BYTES):
                raise StartupError(
                    f"cannot read {path}: it has {size + LENGTH_BYTES} bytes and no complete "
                    "safetensors header; is it truncated, or a Git LFS pointer?"
                )
            file.seek(LENGTH_BYTES)
            rows = json.loads(file.read(length))
        rows.pop("__metadata__", None)
        ends = [row["data_offsets"][1] for row in rows.values()]
        headers = {
            name: TensorHeader(row["dtype"], tuple(row["shape"])) for name, row in rows.items()
        }
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except _DAMAGE as error:
        raise StartupError(f"cannot read {path}: its safetensors header is damaged") from error
    if max(ends, default=0) > size - length:
        raise StartupError(
            f"cannot read {path}: it is truncated: its tensors have {max(ends)} bytes, of which "
            f"{size - length} are there"
        )
    return headers


def _indexed(index: Path) -> dict[str, tuple[Path, TensorHeader]]:
    try:
        names: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        shards = {name: index.parent / Path(file).name for name, file in names.items()}
    except _DAMAGE as error:
        raise StartupError(f"{index} is not a safetensors index: {error!r}") from error
    headers = {path: read_header(path) for path in sorted(set(shards.values()))}
    for name, path in shards.items():
        if name not in headers[path]:
            raise StartupError(f"tensor {name} is in {index.name} but not in {path.name}")
    return {name: (path, headers[path][name]) for name, path in shards.items()}
