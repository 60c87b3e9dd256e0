"""The figures of the page about GPUs are those of its files."""

import json
from typing import Any

from tests.examples.running import ROOT

FOLDER = ROOT / "examples" / "benchmarks" / "results" / "gpu"
PAGE = (FOLDER / "README.md").read_text()
TEXT = " ".join(PAGE.split())
PRODUCTS = {"qkv": "64x64x128x1x4x4", "o": "64x64x128x2x4x4", "down": "64x128x128x4x4x4"}
PRODUCTS |= {"gate and up": "64x128x64x1x4x4", "gate and up, gated": "64x64x64x1x4x4"}
PRODUCTS |= {"head": "64x128x64x1x4x4"}
FP8 = {"qkv": 2, "o": 2, "gate and up": 1, "down": 4}  # splits


def of(name: str) -> Any:
    return json.loads((FOLDER / "h200" / name).read_text())


def test_every_file_is_on_the_page() -> None:
    assert all(f"(h200/{each.name})" in PAGE for each in (FOLDER / "h200").iterdir())


def test_the_steps_with_each_kernel_are_those_measured() -> None:
    found = of("step_variants.json")
    for name, times in found["milliseconds"].items():
        if name == "before":  # the second measurement, beside the others, is shown
            continue
        cells = [
            f"{times[rows]:.2f}" if rows in times else "" for rows in ("1", "8", "64", "128", "256")
        ]
        row = f"| {name.removesuffix(', again')} | {' | '.join(cells)} |"
        assert row.replace("|  |", "| |").replace("|  |", "| |") in PAGE
    rows = found["microseconds of rows of 4096 numbers, gates of 14336"]
    norms, gates = ([round(rows[f"{kind} {who} 16384"]) for who in ("triton", "flashinfer")]
                    for kind in ("norm", "silu"))  # fmt: skip
    assert f"takes {norms[0]} µs by our kernel and {norms[1]} by FlashInfer's" in TEXT
    assert f"a gate of 14,336 {gates[0]} and {gates[1]}" in TEXT


def test_the_parts_of_a_step_are_those_of_its_kernels() -> None:
    def parts(name: str) -> tuple[str, str, str]:
        times = {"attention": 0.0, "products": 0.0, "rest": 0.0}
        for kernel, row in of("step_kernels.json")["steps"][name].items():
            is_product = any(each in kernel for each in ("product", "nvjet", "splitK", "reduce_"))
            kind = "attention" if "Batch" in kernel else "products" if is_product else "rest"
            times[kind] += row["microseconds"] / 1e3
        attention, products, rest = times.values()
        return f"{attention:.2f}", f"{products:.2f}", f"{rest:.2f}"

    attention, products, rest = parts("bfloat16, 64 x 1024")
    assert f"{attention} of attention, {products} of products and {rest} of norms" in TEXT
    attention, products, _ = parts("fp8, 64 x 1024")
    assert f"{attention} were attention, {products} products, 0.53 quantization" in TEXT


def test_products_are_those_measured_with_the_tilings_that_are_used() -> None:
    found = of("products.json")["products"]
    for name, tiling in PRODUCTS.items():
        row = found[f"{name}: 64 rows, bfloat16"]
        times, count = row["microseconds"], row["outputs"] * row["width"]
        cells = [2 * count / 4.3e12 * 1e6, times["torch"], times[tiling]]
        eight = found.get(f"{name}: 64 rows, float8_e4m3fn", {}).get("microseconds")
        if eight:
            cells += [eight["torch"], eight[f"64x64x128x{FP8[name]}x4x5"]]
        assert f"| {name} | {' | '.join(f'{each:.1f}' for each in cells)} |" in PAGE


def test_attention_is_that_measured_with_the_tiles_that_are_used() -> None:
    for case, times in of("decode_kernels.json")["cases"].items():
        count, _, context = case.partition("x")
        label = f"{count} × " + " to ".join(f"{int(each):,}" for each in context.split("-"))
        ours = {name: time for name, time in times["ours"].items() if name.startswith("32x2w4s")}
        name = min(ours, key=ours.__getitem__)
        cells = " | ".join(f"{times[each]:.1f}" for each in ("floor", "FA2", "XQA"))
        assert f"| {label} | {cells} | {ours[name]:.1f} ({name.partition('/')[2]}) |" in PAGE


def test_streams_and_tests_are_those_of_their_files() -> None:
    load = of("http_256_streams_graphs.json")
    rate, quantiles = load["output_tokens_per_second"], load["quantiles"]
    assert f"{rate:,.0f} tokens/s, TTFT {quantiles['ttft'][50]:.2f} s" in TEXT
    assert f"time per output token {quantiles['tpot'][50] * 1e3:.1f} ms" in TEXT
    before = of("http_256_streams.json")
    assert f"{before['output_tokens_per_second']:,.0f} tokens/s" in TEXT
    tests = of("tests.json")
    assert f"All {tests['passed']} of that day passed, in {tests['seconds']:.0f} s" in TEXT
    killed = "test_streams_go_on_after_their_worker_was_killed[cuda]"
    assert tests["recorded"][killed]["seconds from the kill to the end"] == "4.5"
