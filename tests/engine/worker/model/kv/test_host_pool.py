import struct
from dataclasses import replace

import pytest
import torch

from engine.errors import StartupError
from engine.step import BlockMove, Direction
from engine.worker.model.kv.host_pool import HostPool, choose_num_host_blocks
from engine.worker.model.kv.kv_tensors import allocate
from engine.worker.ports import ModelShape
from tests.worker_settings import worker_settings

SHAPE = ModelShape(
    num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, hidden_size=1, vocab_size=1,
    max_positions=100, inner_size=1, layer_parameters=1,
)  # fmt: skip


def table(*blocks: int) -> bytes:
    return struct.pack(f"<{len(blocks)}i", *blocks)


def pool(num_blocks: int, num_host_blocks: int) -> tuple[HostPool, torch.Tensor]:
    """A pool, and the keys of the last layer on the device; every block is full of its number."""
    device = allocate(SHAPE, 2, num_blocks, 4, torch.float32)
    for tensor in (*device.keys, *device.values):
        tensor.copy_(torch.arange(num_blocks).view(-1, 1, 1, 1).expand_as(tensor))
    host = allocate(SHAPE, 2, num_host_blocks, 4, torch.float32)
    return HostPool(device, host), device.keys[1]


def make(pool: HostPool, moves: list[BlockMove]) -> None:
    pool.move(moves).wait()


def first_slots(keys: torch.Tensor) -> list[int]:
    return [int(number) for number in keys[:, 0, 0, 0]]


def test_a_swapped_block_can_come_back_to_any_block() -> None:
    moves, keys = pool(6, 3)
    make(moves, [BlockMove(Direction.OUT, table(4, 1, 2), table(2, 0, 1), is_awaited=False)])
    keys.fill_(9)
    make(moves, [BlockMove(Direction.IN, table(5, 0, 3), table(2, 0, 1), is_awaited=True)])
    assert first_slots(keys) == [1, 9, 9, 2, 9, 4]


def test_moves_are_made_in_order() -> None:
    moves, keys = pool(3, 2)
    make(moves, [BlockMove(Direction.OUT, table(0), table(0), is_awaited=True)])
    make(
        moves,
        [
            BlockMove(Direction.OUT, table(1), table(1), is_awaited=True),
            BlockMove(Direction.IN, table(1), table(0), is_awaited=True),
        ],
    )
    assert first_slots(keys) == [0, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_blocks", [1, 5])
@pytest.mark.parametrize("values_from", [None, 1])
def test_a_swapped_block_comes_back_with_keys_values_and_scales(
    dtype: torch.dtype, num_blocks: int, values_from: int | None
) -> None:
    shape = replace(SHAPE, values_from=values_from)
    device = allocate(shape, 2, num_blocks, 4, dtype)
    filled = [torch.randint(-9, 9, one.shape).to(one.dtype) for one in device.in_memory_order()]
    parts = 2 if values_from is None else 1
    assert len(filled) == parts * (4 if dtype == torch.int8 else 2)
    for tensor, numbers in zip(device.in_memory_order(), filled, strict=True):
        assert tensor.is_contiguous()
        tensor.copy_(numbers)
    moves = HostPool(device, allocate(shape, 2, 1, 4, dtype))
    last = num_blocks - 1
    make(moves, [BlockMove(Direction.OUT, table(last), table(0), is_awaited=True)])
    for tensor in device.in_memory_order():
        tensor.zero_()
    make(moves, [BlockMove(Direction.IN, table(0), table(0), is_awaited=True)])
    for tensor, numbers in zip(device.in_memory_order(), filled, strict=True):
        assert torch.equal(tensor[0], numbers[last])


@pytest.mark.parametrize(
    ("device", "host", "named"),
    [
        (table(6), table(0), "device block ids out of range"),
        (table(-1), table(0), "device block ids out of range"),
        (table(0), table(3), "host block ids out of range"),
        (table(0, 1), table(0), "2 device and 1 host blocks"),
    ],
)
def test_a_move_out_of_range_is_rejected(device: bytes, host: bytes, named: str) -> None:
    moves, keys = pool(6, 3)
    with pytest.raises(ValueError, match=named):
        make(moves, [BlockMove(Direction.IN, device, host, is_awaited=True)])
    assert first_slots(keys) == list(range(6))


def test_more_host_kv_than_memory_is_rejected() -> None:
    def chosen(host_kv_bytes: int) -> int:
        return choose_num_host_blocks(worker_settings("", host_kv_memory=host_kv_bytes), 100, 1000)

    assert (chosen(0), chosen(100), chosen(999)) == (0, 1, 9)
    with pytest.raises(StartupError, match=r"--host-kv-memory 99 bytes is less than one block"):
        chosen(99)
    with pytest.raises(
        StartupError, match=r"--host-kv-memory 1001 bytes is more than the 1000 bytes"
    ):
        chosen(1001)
