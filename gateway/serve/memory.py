"""How much memory each of several models needs, in bytes: its weights, its KV cache and its states.

Before a model is loaded the weights are estimated from its files, and the KV cache is what is left
of the model's part. All models have equal parts of the memory; one whose weights fill more than
`WEIGHTS_SHARE` of its part gets a larger one.
"""

import json
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from engine.errors import StartupError
from engine.transport.process_memory import available_bytes
from engine.worker_settings import WEIGHT_BYTES, WorkerReport
from gateway.serve.cores import count_replicas
from gateway.serve.model_checks import projector_file
from gateway.settings.model import BUILTIN_MODEL
from gateway.settings.settings import Settings

GGUF_BYTES = "adapters.gguf.memory:memory_bytes"
WEIGHTS_SHARE = 0.75  # share of a model's part of the memory; the rest is for its KV cache
DEFAULT_SHARE = 0.75  # share of the memory that is available at the start
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
CPU_BYTES = ITEM_BYTES | {"F64": 4, "F8_E4M3": 2, "F8_E5M2": 2}  # as CPUs compute
PACKED_DTYPE = "I32"  # eight weights of 4 bits
PACKED_BYTES = 0.5  # a weight of 4 bits without scales
Q8_0_BYTES = 34 / 32  # the same weight if groups of inputs are no neighbours
LARGEST_HEADER = 100 << 20  # the header of a safetensors file


@dataclass(frozen=True, slots=True)
class Part:
    """A model's settings with the bound on its KV cache, and the bytes that it needs at most."""

    settings: Settings
    num_bytes: int


def parts_of(deployments: Sequence[Settings], memory: int) -> list[Part]:
    """Each model's part of the memory. Raises `StartupError`, which names the bytes that are
    missing, for a model that does not fit beside those that stay loaded."""
    parts = [_part(each, memory, len(deployments)) for each in deployments]
    pinned = sum(part.num_bytes for part in parts if part.settings.terms.pinned)
    for part in parts:
        needed = pinned + (0 if part.settings.terms.pinned else part.num_bytes)
        if needed > memory:
            beside = (
                " beside the pinned models" if pinned and not part.settings.terms.pinned else ""
            )
            raise StartupError(
                f"the model {part.settings.model.source!r} needs {_text(part.num_bytes)}{beside}: "
                f"{_text(needed - memory)} of --memory are missing, which is {_text(memory)}"
            )
    return parts


def default_memory() -> int:
    """The bytes that several models may have without `--memory`."""
    return int(available_bytes() * DEFAULT_SHARE)


def _part(settings: Settings, memory: int, num_models: int) -> Part:
    weights = weight_bytes(settings) * count_replicas(settings)
    kv, host = settings.kv, settings.tiers.host_kv_memory
    if kv.kv_memory is not None:
        return Part(settings, weights + host + kv.kv_memory)
    if kv.kv_slots is not None:
        return Part(settings, weights + host)  # the rest is known once it is loaded
    part = max(memory // num_models, int(weights / WEIGHTS_SHARE) + host)
    limit = max(1, min(part, memory) - weights - host)
    return Part(replace(settings, kv=replace(kv, kv_memory_limit=limit)), weights + host + limit)


def weight_bytes(settings: Settings) -> int:
    """An estimate of the bytes of a model's weights in memory; 0 if its files are not here yet."""
    source = settings.model.source
    path = Path(source).expanduser()
    if source == BUILTIN_MODEL:
        path = Path(str(files("adapters").joinpath("builtin")))
    if path.is_file():
        item = WEIGHT_BYTES.get(settings.kernels.weights)
        num_bytes: int = resolve_name(GGUF_BYTES)(path, item, settings.kernels.device)
        mmproj = projector_file(settings, path)
        return num_bytes + (0 if mmproj is None else mmproj.stat().st_size)
    checkpoint = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    size = sum(each.stat().st_size for each in checkpoint)
    stored = _stored_dtype(checkpoint[0]) if checkpoint else None
    if stored == PACKED_DTYPE:
        return size + sum(_more_bytes(each, settings.kernels.weights) for each in checkpoint)
    if stored not in ITEM_BYTES:
        return size
    names = (settings.kernels.weights, settings.kernels.dtype)
    wanted = next((WEIGHT_BYTES[name] for name in names if name in WEIGHT_BYTES), None)
    return int(size * (wanted or _own_bytes(stored, settings)) / ITEM_BYTES[stored])


def _own_bytes(stored: str, settings: Settings) -> float:
    """Bytes of a number in memory with `--dtype auto`."""
    return (ITEM_BYTES if settings.kernels.device.startswith("cuda") else CPU_BYTES)[stored]


def _more_bytes(path: Path, weights: str) -> int:
    """How many bytes more than in its file the weights in 4 bits of a safetensors file take."""
    header = _header(path)
    num_bytes = sum(
        stop - start
        for name, (_, start, stop) in header.items()
        if name.endswith((".qweight", ".weight_packed"))
    )
    wanted = WEIGHT_BYTES.get(weights, Q8_0_BYTES if _is_ordered(path, header) else PACKED_BYTES)
    return int(num_bytes * (wanted / PACKED_BYTES - 1))


def _is_ordered(path: Path, header: Mapping[str, "_Stored"]) -> bool:
    """Whether the inputs of the first matrix that says so are grouped by activation."""
    for name, stored in header.items():
        if name.endswith("g_idx"):
            with path.open("rb") as file:
                file.seek(stored.start)
                groups = array("i", file.read(stored.stop - stored.start))
            return list(groups) != sorted(groups)
    return False


class _Stored(NamedTuple):
    """A tensor of a safetensors file: where its bytes begin and end."""

    dtype: str
    start: int
    stop: int


def _stored_dtype(path: Path) -> str | None:
    """The dtype of most bytes in a safetensors file; None if it cannot be read."""
    sizes: dict[str, int] = {}
    for dtype, start, stop in _header(path).values():
        sizes[dtype] = sizes.get(dtype, 0) + stop - start
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


def _header(path: Path) -> dict[str, _Stored]:
    """The tensors of a safetensors file; empty if it cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: Mapping[str, Any] = json.loads(file.read(min(length, LARGEST_HEADER)))
        return {
            name: _Stored(str(tensor["dtype"]), *(8 + length + at for at in tensor["data_offsets"]))
            for name, tensor in header.items()
            if name != "__metadata__"
        }
    return {}


def loaded_bytes(settings: Settings, report: WorkerReport) -> int:
    """The bytes of a loaded model: its weights, and all of its KV blocks and states."""
    format = report.weights.partition(" ")[0]  # "bfloat16 (AVX-512 BF16)"
    item = WEIGHT_BYTES.get(format)
    weights = int(report.num_parameters * item) if item else weight_bytes(settings)  # as stored
    if not weights:
        weights = int(report.num_parameters * WEIGHT_BYTES.get(report.dtype, 4.0))
    workers = settings.workers.num_stages * settings.workers.num_ranks
    kv = report.num_blocks * report.bytes_per_block + report.num_states * report.bytes_per_state
    host = report.tiers.num_host_blocks * report.bytes_per_block
    return weights + workers * (kv + host)


def _text(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f} MiB"
