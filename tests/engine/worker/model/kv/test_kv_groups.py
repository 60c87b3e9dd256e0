from dataclasses import replace
from itertools import pairwise

import pytest

from engine.errors import StartupError
from engine.worker.model.kv.kv_groups import KVGroups
from engine.worker.model.kv.kv_tensors import choose_num_blocks
from engine.worker.ports import AttentionOptions, DeltaShape, KVCapacity, ModelShape
from tests.worker_settings import changed, worker_settings

SHAPE = ModelShape(1, 2, 1, 8, 16, 32, 1000, 97, 128)


def shape(*windows: int | None) -> ModelShape:
    options = tuple(AttentionOptions(window) for window in windows)
    return replace(SHAPE, num_layers=len(windows), attention=options)


def every(period: int, num_layers: int) -> tuple[int | None, ...]:
    """A window in all layers except every `period`th."""
    return tuple(None if layer % period == period - 1 else 512 for layer in range(num_layers))


@pytest.mark.parametrize(
    ("windows", "num_full", "num_windowed", "largest"),
    [
        ((None,) * 28, 1, 0, 28),
        ((4096,) * 32, 0, 1, 32),
        (every(2, 24), 1, 1, 12),  # gpt-oss
        (every(6, 18), 1, 5, 3),  # Gemma 3 270M
        (every(6, 26), 1, 6, 4),  # Gemma 3 1B: 22 with a window and 4 without
        (every(4, 64), 1, 3, 16),  # OLMo 3
        (every(6, 34), 1, 6, 5),
    ],
)
def test_groups_are_as_large_as_they_can_be_without_waste(
    windows: tuple[int | None, ...], num_full: int, num_windowed: int, largest: int
) -> None:
    groups = KVGroups.of(shape(*windows))
    assert groups.windows.count(None) == num_full
    assert len(groups.windows) == num_full + num_windowed
    sizes = [groups.of_layer.count(group) for group in range(len(groups.windows))]
    assert max(sizes) == largest
    assert [groups.windows[group] for group in groups.in_stage(range(len(windows)))] == [*windows]


@pytest.mark.parametrize("bounds", [(0, 18), (0, 9, 18), (0, 7, 13, 18)])
def test_layers_of_a_group_use_different_tensors_on_every_stage(bounds: tuple[int, ...]) -> None:
    groups = KVGroups.of(shape(*every(6, 18)))
    for start, stop in pairwise(bounds):
        span = range(start, stop)
        places = list(zip(groups.in_stage(span), groups.tensors(span), strict=True))
        assert len(set(places)) == len(span)
        assert 1 + max(groups.tensors(span)) <= -(-len(span) // 6) + 1


def test_a_model_of_equal_layers_has_one_group_and_a_tensor_per_layer() -> None:
    groups = KVGroups.of(replace(SHAPE, num_layers=5))
    assert groups.keeps_all
    assert groups.tensors(range(5)) == (0, 1, 2, 3, 4)


def test_a_restarted_worker_gets_as_many_blocks_as_before() -> None:
    capacity = KVCapacity(1 << 30, 1 << 20, 1 << 30, is_shared=True)
    settings = worker_settings("model", block_size=4, max_batch_size=1000)
    for windows in ((None,), (None, 8, 8), (8,)):
        blocks = choose_num_blocks(settings, 1000, 4096, capacity, windows)
        again = changed(settings, kv_slots=blocks // len(windows) * 4)
        assert choose_num_blocks(again, 1000, 4096, capacity, windows) == blocks


def test_windows_bound_the_blocks_that_a_full_batch_can_use() -> None:
    capacity = KVCapacity(1 << 40, 1 << 40, 1 << 40, is_shared=True)
    settings = worker_settings("model", block_size=4, max_batch_size=2, max_batch_tokens=16)
    assert choose_num_blocks(settings, 1000, 4096, capacity) == 2 * 1024
    assert choose_num_blocks(settings, 1000, 4096, capacity, (8,)) == 2 * 11
    assert choose_num_blocks(settings, 1000, 4096, capacity, (None, 8)) == 2 * (1024 + 11)


def test_recurrent_layers_have_no_blocks() -> None:
    layer = DeltaShape(2, 4, 8, 8, 4)
    hybrid = replace(SHAPE, num_layers=8, recurrent=(layer, layer, layer, None) * 2)
    groups = KVGroups.of(hybrid)
    assert groups.keeps_all
    assert groups.of_layer == (None, None, None, 0) * 2
    assert groups.tensors(range(8)) == (0, 1)
    assert groups.tensors(range(4, 8)) == (0,)
    assert groups.tensors(range(3)) == ()


def test_a_model_without_attention_is_rejected() -> None:
    only = replace(SHAPE, num_layers=2, recurrent=(DeltaShape(2, 4, 8, 8, 4),) * 2)
    with pytest.raises(StartupError, match="without attention layers"):
        KVGroups.of(only)
