import mmap
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.errors import StartupError
from engine.transport.process_memory import available_bytes
from engine.worker.model.kv.kv_tensors import (
    CPU_KV_DTYPES,
    allocate,
    bytes_per_block,
    choose_num_blocks,
    untouched_zeros,
)
from engine.worker.ports import KVCapacity, ModelShape
from tests.worker_settings import worker_settings

SHAPE = ModelShape(
    num_layers=3, num_heads=8, num_kv_heads=2, head_dim=16, hidden_size=1, inner_size=1,
    layer_parameters=1, vocab_size=1, max_positions=100,
)  # fmt: skip
BLOCK = 2 * 3 * 16 * 2 * 16 * 4  # keys and values, layers, slots, heads, dim, float32
GIB = 1 << 30


def blocks(
    available: int = 100 * GIB,
    usual: int = 4 * GIB,
    max_model_len: int = 1 << 20,
    **settings: int,
) -> int:
    asked = worker_settings(model="", **settings)
    return choose_num_blocks(
        asked, BLOCK, max_model_len, KVCapacity(available, usual, 0, is_shared=True)
    )


def test_a_block_is_keys_and_values_of_all_layers() -> None:
    assert bytes_per_block(SHAPE, 3, 16, torch.float32) == BLOCK
    assert bytes_per_block(SHAPE, 3, 16, torch.bfloat16) == BLOCK // 2
    assert bytes_per_block(SHAPE, 3, 16, torch.int8) == BLOCK * (16 + 4) // (4 * 16)


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES.values())
def test_a_block_of_keys_that_hold_the_values_is_half_as_large(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, values_from=4)
    assert 2 * bytes_per_block(shape, 3, 16, dtype) == bytes_per_block(SHAPE, 3, 16, dtype)
    cache = allocate(shape, 3, 5, 16, dtype)
    num_bytes = sum(tensor.nbytes for tensor in cache.in_memory_order())
    assert num_bytes == 5 * bytes_per_block(shape, 3, 16, dtype)


def test_slots_count_before_bytes_and_bytes_before_memory() -> None:
    assert blocks(kv_slots=100) == 7  # rounded up to whole blocks
    assert blocks(kv_memory=10 * BLOCK + 1) == 10
    assert blocks() == 4 * GIB // BLOCK


def test_without_a_setting_kv_takes_no_more_than_requests_can_use() -> None:
    assert blocks(max_model_len=100, max_batch_size=5) == 5 * 7


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_memory": BLOCK - 1}, f"--kv-memory {BLOCK - 1} bytes is less than one block"),
        ({"usual": BLOCK - 1}, "less than one block"),
        ({"kv_slots": 1600, "available": 99 * BLOCK}, "are available"),
        ({"block_size": -1}, "--block-size must be at least 1"),
    ],
)
def test_kv_memory_that_is_not_available_is_rejected(settings: dict[str, int], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        blocks(**settings)


@pytest.mark.parametrize("dtype", CPU_KV_DTYPES.values())
def test_blocks_take_the_bytes_that_are_counted_for_them(dtype: torch.dtype) -> None:
    cache = allocate(SHAPE, 3, 5, 16, dtype)
    num_bytes = sum(tensor.nbytes for tensor in cache.in_memory_order())
    assert num_bytes == 5 * bytes_per_block(SHAPE, 3, 16, dtype)


def test_keys_and_values_of_layers_do_not_overlap() -> None:
    cache = allocate(SHAPE, 3, 5, 16, torch.float32)
    assert (cache.num_blocks, cache.block_size) == (5, 16)
    tensors = (*cache.keys, *cache.values)
    for number, tensor in enumerate(tensors):
        assert tensor.shape == (5, 16, 2, 16)
        tensor.fill_(number)
    assert [int(t.float().mean()) for t in tensors] == list(range(6))


SMAPS = Path("/proc/self/smaps")


def resident_kib(tensor: torch.Tensor) -> int:
    """The memory behind the mapping in which the tensor begins."""
    is_its = False
    for line in SMAPS.read_text().splitlines():
        if (found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            start, stop = (int(address, 16) for address in found.groups())
            is_its = start <= tensor.data_ptr() < stop
        elif is_its and line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError("the tensor is in no mapping")


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux reports it")
def test_kv_takes_memory_only_where_it_is_written() -> None:
    zeros = untouched_zeros((24, 8 << 20), torch.float32)  # 768 MiB
    assert resident_kib(zeros) < 64
    for layer in zeros:
        layer[:16] = 1
    assert 24 * 4 <= resident_kib(zeros) < 24 * 4 + 64
    assert float(zeros[3, :32].sum()) == 16


def test_a_bound_of_the_address_space_bounds_the_available_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    for left in (64 << 20, 0):
        monkeypatch.setattr(resource, "getrlimit", lambda _, most=mapped + left: (most, most))
        assert available_bytes() <= left + (1 << 20)


def test_kv_that_cannot_be_mapped_is_an_error_that_names_the_flag_and_what_fits() -> None:
    with pytest.raises(StartupError, match=r"cannot be mapped .* are available; lower --kv-memory"):
        untouched_zeros((1 << 50,), torch.float32)
