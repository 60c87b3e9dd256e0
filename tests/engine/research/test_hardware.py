"""Cost models from data sheets: a device with round numbers, full efficiency, no overheads."""

from dataclasses import replace

import pytest

from engine.errors import InvalidRequest, StartupError
from engine.research.hardware.catalogue import (
    DEVICES,
    SHAPES,
    Deployment,
    DeviceSpec,
    Efficiency,
    ModelSpec,
    parse_spec,
)

DEVICE = DeviceSpec("round", flops=1e12, bandwidth=1e9, memory=3e9, link=1e8, network=1e7)
SHAPE = ModelSpec("small", parameters=1e9, layers=10, hidden=100, width=100, kv_bytes=1000)
IDEAL = Efficiency(
    compute=1.0,
    attention=1.0,
    memory=1.0,
    link=1.0,
    usable_memory=1.0,
    per_step=0.0,
    per_layer=0.0,
    per_collective=0.0,
    per_handoff=0.0,
)
LONE = Deployment(DEVICE, SHAPE, efficiency=IDEAL)


def test_few_tokens_are_bound_by_memory_and_many_by_compute() -> None:
    cost = LONE.cost()
    assert cost.tokens(1) == pytest.approx(2e9 / 1e9)
    assert cost.tokens(1000) == pytest.approx(2.0)  # the ridge: 1e12 / 1e9 tokens
    assert cost.tokens(5000) == pytest.approx(2e9 * 5000 / 1e12)


def test_a_decode_reads_the_slots_and_a_prefill_multiplies_the_pairs() -> None:
    cost = LONE.cost()
    assert cost.attention(1, 99) == pytest.approx(100 * 1000 / 1e9)
    assert cost.attention(2, 0) == pytest.approx(2 * 1000 / 1e9 + 3 * 4 * 100 * 10 / 1e12)


def test_ranks_share_weights_and_compute_and_add_two_all_reduces_per_layer() -> None:
    cost = replace(LONE, ranks=4).cost()
    each = 2 * 3 / 4 * (8 * 100 * 2) / 1e8
    assert cost.tokens(8) == pytest.approx(2.0 / 4 + 2 * 10 * each)
    assert cost.per_slot == pytest.approx(LONE.cost().per_slot / 4)


def test_stages_run_one_after_another_and_add_the_transfers_between_them() -> None:
    cost = replace(LONE, stages=3).cost()
    assert cost.tokens(8) == pytest.approx(2.0 + 2 * (8 * 100 * 2) / 1e7)


def test_overheads_are_added_per_step_layer_collective_and_transfer() -> None:
    lossy = replace(IDEAL, per_step=0.5, per_layer=0.01, per_collective=0.001, per_handoff=0.0002)
    deployed = replace(LONE, stages=2, ranks=2)
    extra = replace(deployed, efficiency=lossy).cost().tokens(1) - deployed.cost().tokens(1)
    assert extra == pytest.approx(0.5 + 0.1 + 20 * 0.001 + 0.0002)


def test_a_slowdown_multiplies_every_cost() -> None:
    slow, cost = replace(LONE, slowdown=3.0).cost(), LONE.cost()
    assert slow.compute(700, 50) == pytest.approx(3 * cost.compute(700, 50))


def test_kv_slots_fill_the_memory_beside_the_weights() -> None:
    assert LONE.num_slots == 1_000_000
    assert replace(LONE, stages=2).num_slots == 4_000_000


def test_the_error_for_a_model_that_does_not_fit_names_model_and_device() -> None:
    with pytest.raises(StartupError, match="gpt3-175b does not fit on 1 × l4"):
        _ = Deployment(DEVICES["l4"], SHAPES["gpt3-175b"]).num_slots


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt3-13b", 13), ("gpt3-101b", 101), ("gpt3-175b", 175), ("gpt3-341b", 341)],
)
def test_orcas_models_have_the_size_in_their_name(name: str, billions: int) -> None:
    assert SHAPES[name].parameters == pytest.approx(billions * 1e9, rel=0.03)


def test_the_error_for_an_invalid_device_names_the_field() -> None:
    values: dict[str, object] = {
        "name": "mine",
        "flops": 1e12,
        "bandwidth": 1e9,
        "memory": 3e9,
        "link": 1e8,
        "network": 1e7,
    }
    assert parse_spec(DeviceSpec, values) == replace(DEVICE, name="mine")
    with pytest.raises(InvalidRequest, match="flops must be a positive number"):
        parse_spec(DeviceSpec, values | {"flops": -1})
    with pytest.raises(InvalidRequest, match="unknown field 'speed'"):
        parse_spec(DeviceSpec, values | {"speed": 1})
    with pytest.raises(InvalidRequest, match="incomplete"):
        parse_spec(DeviceSpec, {"name": "mine"})


def test_kv_moves_to_the_host_over_the_links_of_all_devices_at_once() -> None:
    slow = replace(LONE, device=replace(DEVICE, host=1e6))
    assert slow.slot_seconds == pytest.approx(1000 / 1e6)
    assert replace(slow, stages=2, ranks=4).slot_seconds == pytest.approx(1000 / 8e6)
