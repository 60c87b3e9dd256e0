"""Every number that README.md and the page of results state is in a committed JSON file.

Each claim is written from the JSON; it must be on the page word for word. What is left of the page
without its claims and its settings has no number with a unit.
"""

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from statistics import fmean, median

import pytest
import torch

from engine.worker.model.kv.kv_tensors import bytes_per_block
from engine.worker.ports.shapes import ModelShape
from examples.benchmarks.attacks import memory, report
from examples.benchmarks.layers.encoder_batches import gain
from tests.examples.benchmarks.peer_claims import beside_others, beside_peers, with_recurrent_layers
from tests.examples.benchmarks.published import RESULTS, plain, read
from tests.examples.benchmarks.scheduling_claims import (
    accuracy,
    fastserve,
    fleet,
    iteration_level,
    iteration_level_table,
    itl_goal,
    orca,
    policies,
    policies_in_virtual_time,
)
from tests.examples.running import ROOT

F32 = torch.float32
README = ROOT / "README.md"
PAGE = RESULTS / "README.md"
EXPECTED_STATUSES = {"200", "400", "404", "409", "413", "415", "503", "504"}
UNITS = r"(×|%|ms|s|µs|MiB|nats|tokens/s|requests/s|times)"
NUMBER = re.compile(rf"(?<![\w.])\d[\d.,e-]*(?: to \d[\d.]*)? ?{UNITS}(?![\w/-])")


def starts() -> list[str]:
    found: dict[str, dict[str, list[float]]] = {}
    for one in read("start/figures.json")["rounds"]:
        for key in ("warm_seconds", "cold_seconds"):
            if key in one:
                kinds = found.setdefault(one["server"].split()[0].strip(","), {})
                kinds.setdefault(f"{one['server']} {key}", []).append(one[key])

    def span(kind: str, key: str) -> str:
        medians = [median(times) for name, times in found[kind].items() if name.endswith(key)]
        ends = sorted({f"{end:.1f}" for end in (min(medians), max(medians))})
        return " to ".join(ends)

    own, other = "Podway", "llama-server"
    return [
        f"have their first token after {span(own, 'warm_seconds')} s, "
        f"cold {span(own, 'cold_seconds')} s, llama-server after {span(other, 'warm_seconds')} s"
    ]


# Cost of a token, and of bits


def streaming() -> tuple[float, float, float]:
    found = read("streaming/streaming.json")
    bare = fmean(found[name]["microseconds"] for name in ("bare write", "bare write, again"))
    cost = found["gateway"]["microseconds"]
    return cost, cost / bare, found["gateway, saturated"]["tokens_per_second"]


def streamed_token() -> list[str]:
    return [f"{streaming()[1]:.1f} times the CPU of a bare `transport.write` (goal: 2.5)"]


def streamed_token_in_full() -> list[str]:
    cost, times, most = streaming()
    return [
        f"costs the event loop {cost:.1f} µs of CPU, {times:.1f} times a bare `transport.write`",
        f"the loop streams {most:,.0f} tokens/s",
    ]


def quality() -> list[str]:
    rows = []
    for label, row in read("quality.json").items():
        model, formats = label.split(", ", 1)
        same = f"{100 * row['same']:.1f} %"
        rows.append(f"| {model} | {formats} | {row['mean']:.1e} nats | {row['p99']:.1e} | {same} |")
        assert row["tokens"] == 512
    return rows


def attention_by_kv_dtype() -> list[str]:
    found = read("kv_dtype/amd_zen5.json")["cpu_milliseconds_of_a_layer"]
    rows, shares = [], dict[tuple[str, bool], list[float]]()
    for heads, steps in found.items():
        for step, times in steps.items():
            figures = " | ".join(f"{each:.2f}" for each in times.values())
            rows.append(f"| {heads} | {step} | {figures} |")
            for dtype in ("bfloat16", "int8"):
                kind = dtype, "more after" in step
                if not step.endswith("× 128"):  # too short to tell
                    shares.setdefault(kind, []).append(times[dtype] / times["float16"])
    bfloat16, int8, decodes = (
        f"{min(shares[kind]):.2f} to {max(shares[kind]):.2f}"
        for kind in (("bfloat16", True), ("int8", True), ("int8", False))
    )
    return [
        *rows,
        f"bfloat16, multiplied in pairs, takes {bfloat16} of float16's time",
        f"int8 {int8}, and {decodes} in decodes over 2,048 tokens or more",
    ]


def quality_of_int8_weights() -> list[str]:
    """The table of engine/README.md."""
    found = read("quality.json")
    rows = []
    for bits in (14, 8):
        cells = [f"{bits} bits"]
        for model in ("built-in", "M110"):
            row = found[f"{model}, int8 weights, {bits}-bit activations"]
            cells += [f"{row['mean']:.1e} nats", f"{100 * row['same']:.1f} %"]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def quality_of_gguf_files() -> list[str]:
    """The table of files computed as stored in adapters/models/README.md."""
    found = read("accuracy/gguf.json")
    rows = []
    for name, built_in in found["built-in"].items():
        alone, stored = built_in["weights alone"], built_in["as stored"]
        cells = [name, f"{alone['mean']:.1e} nats", f"{stored['mean']:.1e}"]
        cells += [f"{100 * stored['same']:.1f} %"]
        if others := found["M110"].get(name):
            assert others["14-bit activations"] < 1e-6
            cells += [f"{others[each]:.1e}" for each in ("8-bit activations", "llama-server")]
        rows.append("| " + " | ".join([*cells, *["—"] * (6 - len(cells))]) + " |")
    return rows


def linear_formats() -> list[str]:
    """The second table of engine/README.md."""
    found = read("linear_formats/amd_zen5_1_core.json")["milliseconds_by_rows"]
    rows = []
    for name, times in found.items():
        label = name.replace(" (", ", ").replace(", VNNI)", "")
        rows.append(
            f"| {label} | " + " | ".join(f"{each:.1f} ms" for each in times.values()) + " |"
        )
    return rows


def test_the_loss_of_float16_kv_is_that_of_its_figures() -> None:
    row = read("quality.json")["built-in, float16 KV"]
    assert f"{row['mean']:.1e} nats from float32" in plain((ROOT / "engine/README.md").read_text())
    operations = plain((ROOT / "gateway/OPERATIONS.md").read_text())
    assert f"by at most {row['largest']:.3f} in the built-in model" in operations


def test_the_kv_cache_shrinks_as_readme_says() -> None:
    shape = ModelShape(2, 4, 4, 64, 256, 512, 1, 100, 512)
    sizes = {
        dtype: Fraction(bytes_per_block(shape, 2, 16, dtype)) / bytes_per_block(shape, 2, 16, F32)
        for dtype in (torch.float16, torch.bfloat16, torch.int8)
    }
    assert list(sizes.values()) == [Fraction(1, 2), Fraction(1, 2), Fraction(17, 64)]
    sentence = "float16, half as large as in float32; `--kv-cache-dtype int8` takes 17/64"
    assert sentence in plain(README.read_text())


def attacks() -> list[str]:
    results = [read(f"attacks/{name}.json")["attacks"] for name in ("attacks", "before")]
    rows = [report.row(name, figures) for each in results for name, figures in each.items()]
    return [plain(each) for each in rows]


def memory_under_attack() -> list[str]:
    return [plain(row) for row in memory.rows(read("attacks/memory.json"))]


def fuzzed() -> list[str]:
    found = read("attacks/fuzz.json")
    assert found["wrong"] == 0
    counts = Counter[str]()
    for statuses in found["operations"].values():
        counts.update(statuses)
    assert not [status for status in counts if status not in EXPECTED_STATUSES]
    return [
        f"{found['requests']:,} requests to {len(found['operations'])} operations",
        f"{counts['503']} simulations were rejected with a 503",
        f"{counts['504']} requests got a 504",
    ]


def kills() -> list[str]:
    found = read("survival/survival.json")
    assert found["failures"] == []
    return [
        f"| workers killed | {found['kills']} |",
        f"| answers | {found['answers']}, with {found['tokens']:,} tokens |",
        f"| new requests that got a 503 | {found['unavailable']} |",
        f"| kills that waited for a worker to be started | {found['late_kills']} |",
        f"| longest pause around a kill, median of the kills | {median(found['pauses']):.1f} s |",
        f"| longest pause within a stream | {found['longest_pause']:.1f} s |",
        f"| the same before the first kill | {found['undisturbed_pause']:.1f} s |",
    ]


def chaos() -> list[str]:
    """The tables of the hour in which everything failed."""
    run = read("chaos/chaos.json")
    tally, faults = run["tally"], run["faults"]
    return [
        f"{run['seconds'] / 60:.0f} minutes: {sum(tally['behaviours'].values())} requests, "
        f"{sum(tally['answers'].values())} whole answers, all compared; "
        f"{sum(faults.values())} faults; {len(tally['failures'])} different or lost.",
        *(f"| {name} | {count} |" for name, count in faults.items()),
        *(f"| {name} | {count} |" for name, count in tally["behaviours"].items()),
    ]


def encoders_in_batches() -> list[str]:
    found = read("images/batches.json")
    shares = [gain(times) for each in found.values() for times in each.values()]
    return [f"would save {min(shares):.1%} to {max(shares):.1%} of the CPU time"]


CLAIMS: list[tuple[Path, Callable[[], list[str]]]] = [
    (README, starts),
    (README, iteration_level),
    (README, orca),
    (README, streamed_token),
    (PAGE, iteration_level_table),
    (PAGE, beside_peers),
    (PAGE, with_recurrent_layers),
    (PAGE, orca),
    (PAGE, fastserve),
    (PAGE, policies),
    (PAGE, policies_in_virtual_time),
    (PAGE, itl_goal),
    (RESULTS / "accuracy" / "README.md", accuracy),
    (RESULTS / "fleet" / "README.md", fleet),
    (PAGE, streamed_token_in_full),
    (PAGE, quality),
    (RESULTS / "kv_dtype" / "README.md", attention_by_kv_dtype),
    (ROOT / "engine" / "README.md", quality_of_int8_weights),
    (ROOT / "engine" / "README.md", linear_formats),
    (ROOT / "adapters" / "models" / "README.md", quality_of_gguf_files),
    (RESULTS / "attacks" / "README.md", attacks),
    (RESULTS / "attacks" / "README.md", memory_under_attack),
    (RESULTS / "attacks" / "README.md", fuzzed),
    (RESULTS / "survival" / "README.md", kills),
    (RESULTS / "chaos" / "README.md", chaos),
    (PAGE, encoders_in_batches),
]


def test_the_better_figure_is_in_bold_beside_other_servers() -> None:
    lines = README.read_text().splitlines()
    assert [row for row in beside_others() if row not in lines] == []


@pytest.mark.parametrize(("page", "claims"), CLAIMS, ids=lambda value: getattr(value, "name", None))
def test_a_page_states_what_the_json_says(page: Path, claims: Callable[[], list[str]]) -> None:
    text = plain(page.read_text())
    for claim in claims():
        assert claim in text


SETTINGS = {  # numbers of the benchmarks' loads and of the papers
    README: ("64 output tokens", "128 prompt tokens", "76.6 % of 475"),
    PAGE: (
        "a median of 190 ms per token",
        "at 16 requests/s",
        "at 180 % of capacity",
    ),
}


@pytest.mark.parametrize("page", SETTINGS, ids=["README", "results"])
def test_a_page_states_no_other_number(page: Path) -> None:
    text = plain(page.read_text())
    for _, claims in (row for row in CLAIMS if row[0] == page):
        for claim in claims():
            text = text.replace(claim, "")
    for setting in SETTINGS[page]:
        assert setting in text
        text = text.replace(setting, "")
    assert [found[0] for found in NUMBER.finditer(text)] == []


def test_measurements_of_attacks_replace_the_rows_of_their_own_tables() -> None:
    page = (RESULTS / "attacks" / "README.md").read_text()
    series = memory.rows(read("attacks/memory.json"))
    assert report.write_table(page, read("attacks/attacks.json")["attacks"]) == page
    assert report.replace_rows(page, memory.COLUMNS, series) == page
    other = report.replace_rows(page, memory.COLUMNS, ["| x | 1 | 2 | 3 |"])
    assert len(other.splitlines()) == len(page.splitlines()) - len(series) + 1


def test_the_score_of_the_built_in_model_is_that_of_its_card() -> None:
    card = (ROOT / "adapters" / "builtin" / "README.md").read_text()
    (right, asked, share) = re.findall(
        r"\| \*\*overall\*\* \| (\d+) / (\d+) \| ([\d.]+)% \|", card
    )[0]
    assert f"{share} % of {asked}" in plain(README.read_text())
    assert f"{100 * int(right) / int(asked):.1f}" == share
