"""The page about measuring a GPU, and what it estimates, have the figures of their files."""

import json
import re
from dataclasses import replace

import pytest

from examples.benchmarks.gpu import estimate
from tests.examples.running import ROOT


def test_the_page_has_the_figures_of_the_estimate() -> None:
    text = (ROOT / "examples" / "benchmarks" / "gpu" / "README.md").read_text()
    assert "\n".join(estimate.lines()) in text


def test_the_estimated_layers_take_as_long_as_an_h200_measured() -> None:
    folder = ROOT / "examples/benchmarks/results/gpu/h200"
    attention = json.loads((folder / "decode_kernels.json").read_text())["cases"]["64x1024"]
    assert pytest.approx(attention["FA2"]) == estimate.FA2 * 1e6
    assert pytest.approx(min(attention["ours"].values())) == estimate.OURS * 1e6
    text = " ".join((ROOT / "adapters" / "attention" / "README.md").read_text().split())
    ours, fa2 = (f"{each * 1e6:.0f}" for each in (estimate.OURS, estimate.FA2))
    assert f"{ours} µs a layer for 64 decodes of 1,024 tokens, FA2 at {fa2} and" in text
    assert f"FlashInfer's XQA at {attention['XQA']:.0f}" in text
    found = json.loads((folder / "step_variants.json").read_text())["milliseconds"]
    apart, fused = estimate.APART, replace(estimate.FUSED, attention=estimate.FA2, small=3)
    for version, name in (
        (apart, "dependent launches, our norm, our products where faster"),
        (fused, "and gates in products"),
    ):
        head = estimate.ITEM * estimate.VOCAB * estimate.HIDDEN
        layers = version.seconds - estimate.OUTSIDE - head / (version.gemm * estimate.BANDWIDTH)
        assert layers * 1e3 == pytest.approx(found[name]["64"], rel=0.01)


def test_the_page_has_what_an_h200_measured_before() -> None:
    folder = ROOT / "examples/benchmarks/results/gpu/h200"
    text = " ".join((ROOT / "examples" / "benchmarks" / "gpu" / "README.md").read_text().split())
    tests, load, alone = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("tests", "http_256_streams_graphs", "llama_8b_bf16")
    )
    (step,) = [row for row in alone["rows"] if (row["kind"], row["num_requests"]) == ("decode", 64)]
    estimated = f"{estimate.FUSED.seconds * 1e3:.1f} ms at 64 × 1,024 are estimated"
    assert f"{tests['passed']} tests passed" in text
    assert f"{estimated}, {step['seconds'] * 1e3:.1f} were measured" in text
    assert f"{load['output_tokens_per_second']:,.0f} tokens/s before these kernels" in text


def test_the_price_of_batch_invariance_is_the_estimated_one() -> None:
    text = " ".join((ROOT / "engine" / "README.md").read_text().split())
    price = estimate.INVARIANT.seconds / estimate.FUSED.seconds - 1
    assert f"({price:.0%} for [an 8B model and 64 requests]".replace("%", " %") in text


def test_the_page_has_the_seconds_of_compiled_modules() -> None:
    found = json.loads(
        (ROOT / "examples/benchmarks/results/gpu_builds/flashinfer.json").read_text()
    )
    text = " ".join((ROOT / "examples" / "benchmarks" / "gpu" / "README.md").read_text().split())
    ((name, seconds),) = found["seconds"].items()
    assert name.startswith("batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_")
    assert "_head_dim_qk_128_" in name
    assert f"FA2 for Llama's heads takes {seconds:.0f} s on {found['machine']}" in text
    assert f"load average {found['load_average']} " in text


def test_the_tests_that_the_page_names_exist() -> None:
    text = (ROOT / "examples" / "benchmarks" / "gpu" / "README.md").read_text()
    named = re.findall(r"`((?:[a-z_]+/)*test_[a-z_0-9]+\.py)`", text)
    folders = ("", "tests/engine/worker/cuda", "tests/adapters/attention")
    assert len(named) > 15
    for name in named:
        assert any((ROOT / folder / name).is_file() for folder in folders), name
