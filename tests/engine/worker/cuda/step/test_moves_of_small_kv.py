from array import array

import pytest
import torch

from engine.step import BlockMove, Direction
from engine.worker.cuda.step.kv_mover import DeviceMover
from engine.worker.ports import KVTensors, as_bytes
from tests.engine.worker.cuda.standin import StandInStreams


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_blocks_come_back_as_they_went(dtype: torch.dtype, parts: int) -> None:
    """With values that are a part of the keys, too."""
    whole = torch.randn((3, parts, 5, 4, 2, 8)).to(dtype)  # layers, keys and values, blocks
    cache = KVTensors(tuple(whole[:, 0]), tuple(whole[:, 1]) if parts == 2 else (), 1)
    streams = StandInStreams()
    mover = DeviceMover(streams, cache, streams.pinned((2, 3, parts, 4, 2, 8), dtype))
    before = whole.clone()
    pairs = array("i", (3, 0)).tobytes(), array("i", (0, 1)).tobytes()
    for direction in (Direction.OUT, Direction.IN):
        mover.move((BlockMove(direction, *pairs, is_awaited=True),)).wait()
        if direction is Direction.OUT:
            as_bytes(whole).zero_()
    for block in (0, 3):
        assert torch.equal(as_bytes(whole)[:, :, block], as_bytes(before)[:, :, block])
    assert not as_bytes(whole)[:, :, 1].any()
