"""The size and allocation of the paged KV cache of one stage.

A slot holds the KV of one token in all layers of the stage; a block is `block_size` slots.
Only the scheduler's ledger knows which request owns which block.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.transport.process_memory import available_bytes
from engine.worker.ports import KVCapacity, KVTensors, ModelShape
from engine.worker_settings import WorkerSettings

CPU_KV_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


def size_text(num_bytes: int) -> str:
    """Bytes for a message: `1.5 GiB`, or MiB or bytes if there are few."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size // 10:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes} bytes"


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether KV in this dtype has a scale for each token and head."""
    return dtype == torch.int8


def bytes_per_block(shape: ModelShape, num_layers: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys, values and their scales in all layers of the stage."""
    scale_bytes = torch.float32.itemsize if is_scaled(dtype) else 0
    head_bytes = shape.head_dim * dtype.itemsize + scale_bytes
    parts = 2 if shape.values_from is None else 1
    return parts * num_layers * block_size * shape.num_kv_heads * head_bytes


def choose_num_blocks(
    settings: WorkerSettings,
    block_bytes: int,
    max_model_len: int,
    capacity: KVCapacity,
    windows: Sequence[int | None] = (None,),
) -> int:
    """The number of KV blocks, a multiple of the number of layer groups, of which `windows` has the
    windows. Raises `StartupError` if none fit or the settings ask for too many.

    Without a setting it is `capacity.usual`, but never more than `max_batch_size` requests of full
    length can use.
    """
    kv, num_groups = settings.kv, len(windows)
    size = kv.block_size
    if size < 1:
        raise StartupError(f"--block-size must be at least 1, not {size}")
    if kv.kv_slots:
        blocks, setting = kv.num_blocks, f"--kv-slots {kv.kv_slots}"
    elif kv.kv_memory:
        blocks = kv.kv_memory // block_bytes // num_groups
        setting = f"--kv-memory {size_text(kv.kv_memory)}"
    else:
        enough = settings.max_batch_size * _blocks_of_request(settings, max_model_len, windows)
        blocks = min(capacity.usual // block_bytes, enough) // num_groups
        setting = f"the memory left for the KV cache ({size_text(capacity.usual)})"
    if blocks < 1:
        block = f"{size} slots ({size_text(block_bytes * num_groups)})"
        raise StartupError(f"{setting} is less than one block of {block}")
    needed = blocks * num_groups * block_bytes
    if needed > capacity.most:
        raise StartupError(
            f"{setting} needs {size_text(needed)} for the KV cache, but "
            f"{size_text(capacity.most)} of memory are available; lower it"
        )
    return blocks * num_groups


def _blocks_of_request(
    settings: WorkerSettings, max_model_len: int, windows: Sequence[int | None]
) -> int:
    """The most blocks of a request of full length, in all layer groups."""
    size = settings.kv.block_size
    whole, chunk = -(-max_model_len // size), 2 * settings.max_batch_tokens
    in_window = [-(-(window + chunk) // size) + 1 for window in windows if window is not None]
    num_full = len(windows) - len(in_window)
    return num_full * whole + sum(min(whole, blocks) for blocks in in_window)


def allocate(
    shape: ModelShape, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype
) -> KVTensors:
    """A zeroed cache; the system backs its pages with memory only when they are written.

    The slots of one head in a block are contiguous, as CPU attention reads them: values slot by
    slot, keys dimension by dimension, or slot by slot too if values are a part of them.
    """
    heads, dim = shape.num_kv_heads, shape.head_dim
    values = untouched_zeros((num_layers, num_blocks, heads, block_size, dim), dtype)
    sizes = (2, num_layers if is_scaled(dtype) else 0, num_blocks, heads, block_size)
    if shape.values_from is not None:
        (scales,) = untouched_zeros((1, *sizes[1:]), torch.float32)
        rows = tuple(values.permute(0, 1, 3, 2, 4))
        return KVTensors(rows, (), key_scales=tuple(scales.transpose(2, 3)))
    keys = untouched_zeros((num_layers, num_blocks, heads, dim, block_size), dtype)
    scales = untouched_zeros(sizes, torch.float32)
    return KVTensors(
        keys=tuple(keys.permute(0, 1, 4, 2, 3)),
        values=tuple(values.permute(0, 1, 3, 2, 4)),
        key_scales=tuple(scales[0].transpose(2, 3)),
        value_scales=tuple(scales[1].transpose(2, 3)),
    )


def untouched_zeros(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in small pages, none of which takes memory before it is written.

    In huge pages of 2 MiB the first token of a model with 24 layers takes 96 MiB. Small ones are
    read as fast by one core and up to 10 % more slowly by two, which only long contexts notice, and
    each takes about 4 µs of CPU time more to be written for the first time.
    """
    num_bytes = prod(sizes) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(sizes, dtype=dtype)
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StartupError(
            f"{size_text(num_bytes)} for the KV cache cannot be mapped ({error.strerror}), "
            f"{size_text(available_bytes())} are available; lower --kv-memory"
        ) from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # the system has no huge pages
            mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8).view(dtype).view(sizes)
