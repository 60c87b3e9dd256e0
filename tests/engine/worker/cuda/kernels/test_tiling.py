import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.worker.cuda.kernels.tiling import (
    EIGHT_BIT,
    FEW_ROWS_4_BIT,
    FIXED,
    FIXED_4_BIT,
    GATED,
    LONG,
    MANY_ROWS_GATED,
    MIDDLE,
    MORE_ROWS_8_BIT,
    MORE_ROWS_GATED,
    MORE_ROWS_LONG,
    MORE_ROWS_MIDDLE,
    MORE_ROWS_NARROW,
    MORE_ROWS_WIDE,
    NARROW,
    NARROW_4_BIT,
    WIDE,
    WIDE_4_BIT,
    Tiling,
    expert_tiling,
    four_bit_tiling,
    gated_tiling,
    has_room,
    tiling_of,
)
from engine.worker.cuda.model.linears import FastProducts

MEASURED = Path(__file__).parents[5] / "examples/benchmarks/results/gpu/h200/products.json"


def weight(outputs: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(outputs, width, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype", "wanted"),
    [
        (1, 128256, torch.bfloat16, WIDE),
        (16, 28672, torch.int8, EIGHT_BIT),
        (16, 6144, torch.bfloat16, MIDDLE),
        (16, 4096, torch.bfloat16, NARROW),
        (1, 4095, torch.bfloat16, None),
        (16, 4096, torch.float8_e4m3fn, replace(EIGHT_BIT, splits=2)),
        (17, 128256, torch.bfloat16, MORE_ROWS_WIDE),
        (64, 16384, torch.float16, MORE_ROWS_WIDE),
        (64, 6144, torch.bfloat16, MORE_ROWS_MIDDLE),
        (64, 4096, torch.bfloat16, MORE_ROWS_NARROW),
        (65, 128256, torch.bfloat16, None),
        (64, 4096, torch.int8, replace(MORE_ROWS_8_BIT, splits=2)),
        (64, 16384, torch.int8, MORE_ROWS_8_BIT),
        (65, 4096, torch.int8, None),
    ],
)
def test_few_rows_of_large_and_of_8_bit_weights_are_our_kernels(
    rows: int, outputs: int, dtype: torch.dtype, wanted: Tiling | None
) -> None:
    assert tiling_of(rows, weight(outputs, 4096, dtype)) == wanted


def test_other_gpus_than_hopper_and_blackwell_of_data_centers_have_torchs_products() -> None:
    found = [has_room(each) for each in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert found == [False, False, True, True, False]


def test_weights_of_few_inputs_are_torchs_unless_they_are_wide() -> None:
    assert tiling_of(1, weight(9728, 896, torch.bfloat16)) is None
    assert tiling_of(64, weight(151936, 896, torch.bfloat16)) is None
    assert tiling_of(16, weight(151936, 896, torch.bfloat16)) == WIDE


def test_a_long_weight_is_split_further() -> None:
    assert tiling_of(64, weight(4096, 14336, torch.bfloat16)) == MORE_ROWS_LONG
    assert tiling_of(16, weight(4096, 14336, torch.bfloat16)) == LONG
    assert tiling_of(64, weight(4096, 14336, torch.int8)) == replace(MORE_ROWS_8_BIT, splits=4)
    assert tiling_of(65, weight(4096, 14336, torch.bfloat16)) is None


def test_gated_products_have_up_to_128_rows_and_enough_blocks() -> None:
    assert [gated_tiling(rows, 28672) for rows in (1, 16, 17, 64, 65, 128, 129)] == [
        GATED, GATED, MORE_ROWS_GATED, MORE_ROWS_GATED, MANY_ROWS_GATED, MANY_ROWS_GATED, None
    ]  # fmt: skip
    assert gated_tiling(1, 16383) is None


@pytest.mark.parametrize(
    ("rows", "outputs", "wanted"),
    [
        (16, 28672, WIDE_4_BIT),
        (1, 4096, NARROW_4_BIT),
        (17, 28672, FIXED_4_BIT),
        (64, 4096, replace(FIXED_4_BIT, splits=4)),
        (65, 4096, replace(FIXED_4_BIT, splits=2)),
        (256, 4096, FIXED_4_BIT),
        (257, 28672, None),
    ],
)
def test_up_to_256_rows_of_4_bit_weights_are_our_kernel_and_more_are_unpacked(
    rows: int, outputs: int, wanted: Tiling | None
) -> None:
    assert four_bit_tiling(rows, outputs) == wanted


def test_experts_have_larger_tiles_where_each_has_more_rows_than_the_smaller_one() -> None:
    assert expert_tiling(512, 32) == FEW_ROWS_4_BIT
    assert expert_tiling(513, 32) == FIXED_4_BIT


def test_the_choice_is_nearly_the_fastest_that_was_measured() -> None:
    """On one GPU, between a few tilings."""
    unmeasured = 0
    for shape, row in json.loads(MEASURED.read_text())["products"].items():
        times = row["microseconds"]
        outputs, width = row["outputs"], row["width"]
        if row["is_gated"]:
            chosen = gated_tiling(row["rows"], outputs)
        else:
            dtype = getattr(torch, row["dtype"])
            chosen = tiling_of(row["rows"], weight(outputs, width, dtype))
        name = "torch" if chosen is None else str(chosen)
        unmeasured += name not in times
        assert times.get(name, 0.0) <= 1.06 * min(times.values()), shape
    assert unmeasured <= 3, "of 27"


def test_batch_invariant_products_have_one_tiling_whatever_the_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = []

    class Gemm:
        Epilogue = tuple
        takes = staticmethod(lambda x, weight: True)

        @staticmethod
        def product(x: object, weight: object, tiling: Tiling, *_: object) -> object:
            used.append(tiling)
            return x

    fast = FastProducts(None, Gemm, is_batch_invariant=True)  # type: ignore[arg-type]
    for rows in (1, 64, 5000):
        fast.product(torch.ones(rows, 32), torch.ones(48, 32), torch.float32)
    assert used == [FIXED] * 3
