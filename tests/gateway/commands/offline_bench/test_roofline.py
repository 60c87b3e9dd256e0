"""Floors worked out by hand, and sizes beside the models' own counts."""

from dataclasses import replace

import pytest

from adapters.models.named_shapes import SHAPES
from engine.errors import StartupError
from engine.worker_settings import WorkerReport
from gateway.commands.offline_bench.roofline import (
    Limit,
    WeightSizes,
    Work,
    attention_rate,
    lower_bound_of,
)
from tests.worker_settings import worker_report

SMALL = WeightSizes(
    num_layers=3,
    kv_elements=10,
    other_elements=100,
    head_elements=1000,
    attention_width=8,
    kv_width=4,
    max_positions=64,
    window=None,
)


def report(weights: str = "float32") -> WorkerReport:
    return worker_report(
        vocab_size=50,
        eos_token_ids=(),
        num_blocks=9,
        block_size=4,
        bytes_per_block=4 * 96,
        weights=weights,
    )


def test_matrices_are_those_that_the_checkpoints_have() -> None:
    elements = {name: WeightSizes.of(config).elements for name, config in SHAPES.items()}
    assert elements["Llama-3.1-8B"] == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    assert elements["Qwen2.5-0.5B"] == 494_032_768 - 49 * 896 - 24 * (896 + 2 * 128)
    embedding, norms = 50304 * 2048, (4 * 16 + 1) * 2048
    assert elements["OLMoE-1B-7B"] == 6_919_161_856 - embedding - norms
    norms_and_sinks = 49 * 2880 + 24 * 64
    biases = 24 * ((64 + 2 * 8) * 64 + 2880 + 32 + 32 * (2 * 2880 + 2880))
    embedding = 201088 * 2880
    assert elements["gpt-oss-20b"] == 20_914_757_184 - embedding - norms_and_sinks - biases
    embedding, norms = 102400 * 2048, 55 * 2048 + 27 * 512
    more = 3 * 2048 * (66 * 1408 - 10944) + 64 * 2048  # as if its first layer had experts
    assert elements["DeepSeek-V2-Lite"] == 15_706_484_224 - embedding - norms + more
    embedding, norms = 151936 * 2048, 97 * 2048 + 48 * 2 * 128
    assert elements["Qwen3-30B-A3B"] == 30_532_122_624 - embedding - norms


def test_a_decode_reads_all_matrices_and_the_context_of_each_request() -> None:
    work = Work(num_requests=2, num_tokens=1, context=6)
    limits = {"read": Limit(10.0, ""), "float32": Limit(100.0, "")}
    found = lower_bound_of(SMALL, work, report(), limits)
    kv = 2 * 6 * 96 + 2 * 96  # read and written
    assert found.reading == pytest.approx((1330 * 4 + kv + 2 * 50 * 4) / 10)
    pairs = 3 * 6
    assert found.computing == pytest.approx((2 * 2 * 1330 + 4 * 8 * 2 * pairs) / 100)
    assert found.bound == "read"
    assert found.seconds == found.reading


def test_a_step_of_a_mixture_reads_at_least_the_experts_of_one_token() -> None:
    sizes = replace(SMALL, num_experts=8, top_k=2, expert_elements=30)  # 60 of the 100 are experts'
    assert sizes.elements == 1330 + 3 * 6 * 30
    assert sizes.read_elements == SMALL.read_elements == 1330
    assert sizes.products(Work(4, 1, 6)) == SMALL.products(Work(4, 1, 6))


def test_a_prefill_computes_only_sampled_rows_in_the_last_layer() -> None:
    work = Work(num_requests=1, num_tokens=5, context=5)
    assert SMALL.products(work) == 2 * (5 * (2 * 110 + 10) + 100 + 1000)
    assert SMALL.attention(work) == 4 * 8 * (2 * 15 + 5)


def test_int8_reads_a_quarter_of_the_bytes_and_has_its_own_rate() -> None:
    work = Work(1, 1, 1)
    limits = {"read": Limit(1e9, ""), "float32": Limit(100.0, ""), "int8": Limit(400.0, "")}
    found = lower_bound_of(SMALL, work, report("int8 (14-bit activations)"), limits)
    assert found.reading == pytest.approx((1330 + 96 + 96 + 200) / 1e9)
    assert found.computing == pytest.approx(2 * 1330 / 400 + 4 * 8 * 3 / 100)
    assert found.bound == "compute"


@pytest.mark.parametrize(
    ("kv_dtype", "rate"),
    [("float32", 100.0), ("float16", 300.0), ("bfloat16", 900.0), ("int8", 900.0)],
)
def test_attention_is_bounded_by_the_faster_of_floats_and_their_parts(
    kv_dtype: str, rate: float
) -> None:
    rates = {"float32": 100.0, "bfloat16": 900.0}
    assert attention_rate(rates, "float32", kv_dtype) == rate
    assert attention_rate(rates | {"bfloat16": 90.0}, "float32", kv_dtype) == 100.0
    assert attention_rate({"float32": 100.0}, "float32", kv_dtype) == 100.0


def test_a_window_bounds_the_attended_tokens() -> None:
    config = {**SHAPES["Mistral-7B"], "sliding_window": 4}
    sizes = WeightSizes.of(config)
    pairs = 1 + 2 + 3 + 4 + 4 + 4
    expected = 4 * 4096 * (31 * pairs + 4)
    assert sizes.attention(Work(1, 6, 6)) == expected
    assert sizes.attention(Work(1, 1, 6)) == 4 * 4096 * 32 * 4


def test_a_missing_field_is_named_in_the_error() -> None:
    with pytest.raises(StartupError, match="hidden_size is None, expected a positive integer"):
        WeightSizes.of({"vocab_size": 3})
