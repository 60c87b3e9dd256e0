from pathlib import Path
from statistics import median
from typing import Any

import pytest

from adapters.models.named_shapes import SHAPES
from examples.benchmarks.peers.larger import LOADS, MODELS, plan, together
from examples.benchmarks.peers.larger_page import page
from tests.examples.benchmarks.peer_claims import alone
from tests.examples.benchmarks.published import RESULTS, read

GIB = 1 << 30


def test_every_larger_model_is_a_named_shape() -> None:
    assert {each.name for each in MODELS} <= SHAPES.keys()


def test_every_server_with_files_of_a_format_is_started(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "Qwen3-4B-q4_0.gguf").touch()
    (tmp_path / "ov" / "Qwen3-4B-int8").mkdir(parents=True)
    (tmp_path / "vllm" / "Qwen3-4B-bf16").mkdir(parents=True)
    servers, missing = plan(list(MODELS[:1]), tmp_path, 20 * GIB)
    assert [each.name for each in servers] == [
        "Podway Qwen3-4B, q4_0",
        "llama-server Qwen3-4B, q4_0",
        "Podway Qwen3-4B, q8_0",
        "OpenVINO Qwen3-4B, q8_0",
        "Podway Qwen3-4B, bf16",
        "vLLM Qwen3-4B, bf16",
    ]
    assert servers[0].command[2].endswith(".gguf")
    assert servers[2].command[2] == "random:Qwen3-4B"
    assert "Qwen3-4B, q4_k_m: Podway has no such model" in missing


def test_what_does_not_fit_in_memory_is_named(tmp_path: Path) -> None:
    servers, missing = plan(list(MODELS), tmp_path, 8 * GIB)
    assert "Qwen3-30B-A3B, q4_0: 18 GiB are needed, 8 GiB available" in missing
    assert {each.group.split(",")[0] for each in servers} == {
        "Qwen3-4B",
        "Qwen3.5-4B",
        "Llama-3.1-8B",
    }


def test_servers_that_do_not_fit_together_are_measured_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "Qwen3-30B-A3B-q4_0.gguf").touch()
    servers, _ = plan([each for each in MODELS if each.billions > 30], tmp_path, 20 * GIB)
    podway, llama = servers
    assert together(servers, 38 * GIB) == [[podway, llama]]
    assert together(servers, 20 * GIB) == [[podway], [llama]]
    assert together([podway, llama, podway], 40 * GIB) == [[podway, llama], [podway]]


def run(*loads: str) -> dict[str, Any]:
    figures = {"output_rate": 31.5, "ttft_p50": 2.5, "itl_p50": 0.125}
    return {
        "round": 0,
        "server": "Podway",
        "group": "Qwen3-4B, q4_0",
        "first_token_seconds": 3.0,
        "pss_mib_at_start": 2500,
        "pss_mib_after": 2900,
        "loads": {
            name: figures | {"wall_seconds": 9.0, "other_cpu_seconds": 0.1} for name in loads
        },
    }


GROUPS = ["Qwen3-4B, q4_0", "Qwen3-4B, q8_0"]


def test_lone_streams_have_their_decode_speed_and_concurrent_ones_all_tokens_per_second() -> None:
    text = page([run(*(load.name for load in LOADS))], LOADS, GROUPS[:1], [])
    for title in ("128 in: tokens/s", "4,096 in: tokens/s", "C=4 tokens/s", "C=16 tokens/s"):
        assert title in text
    assert f"| Podway | 8.0 | 2.5 | 31.5 | 31.5 |{4 * ' 8.0 | 2.5 |'}" in text


def test_the_page_of_some_loads_names_those_that_were_not_run() -> None:
    text = page([run("128 in", "C=4")], LOADS, GROUPS, ["a reason"])
    assert "C=16 tokens/s" not in text
    others = run("128 in") | {"server": "llama-server"}
    others["loads"]["C=4"] = {"failed": ["an error"]}
    few = page([run("128 in", "C=4"), others, run() | {"server": "vLLM"}], LOADS, GROUPS, [])
    assert "| llama-server | 8.0 | 2.5 | failed |" in few
    assert "| vLLM | not run | not run | not run |" in few
    assert "- Qwen3-4B, q4_0: C=16, 1,024 in, 4,096 in, 16,384 in, 32,768 in\n" in text
    assert "- Qwen3-4B, q8_0: all loads\n- a reason\n" in text


@pytest.mark.parametrize(
    ("folder", "num_rows"),
    [("larger_zen5", 25), ("larger_zen4", 20), ("larger_avx2", 10), ("larger_stored_avx2", 8)],
)
def test_the_published_tables_are_those_of_its_runs(folder: str, num_rows: int) -> None:
    names = [f"{model.name}, {format.gguf}" for model in MODELS for format in model.formats]
    made = page(read(f"peers/{folder}/figures.json"), LOADS, names, ())
    published = (RESULTS / f"peers/{folder}/README.md").read_text()
    rows = [line for line in made.splitlines() if line.startswith(("|", "- "))]
    assert len(rows) > num_rows
    assert [row for row in rows if row not in published] == []


def test_first_starts_are_those_of_their_runs() -> None:
    rows = read("peers/larger_zen5/first_starts.json")
    published = (RESULTS / "peers/larger_zen5/README.md").read_text()
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = []
        for version in ("before", "now"):
            found = [
                row["seconds"] for row in rows if (row["case"], row["version"]) == (case, version)
            ]
            cells.append(f"{median(found):.1f} ({min(found):.1f}–{max(found):.1f})")
        assert f"| {case} | {' | '.join(cells)} |" in published


def test_lone_streams_are_compared_answer_by_answer() -> None:
    published = (RESULTS / "peers/larger_zen5/README.md").read_text()
    best, letter = alone("larger_zen5", "Podway q8_0", "Qwen3-4B, 8 bits")
    beside_vllm, _ = alone("larger_zen5", "Podway q8_0", "Qwen3-4B, 8 bits, beside vLLM")
    assert letter == "O"
    assert f"{beside_vllm:.2f} times vLLM's tokens/s and {best:.2f} times OpenVINO's" in published
    in_bfloat16, _ = alone("larger_zen5", "Podway bf16", "Qwen3-4B, bfloat16")
    assert f"Podway has {in_bfloat16:.2f} times vLLM's\ntokens/s in bfloat16" in published
    hybrid, _ = alone("larger_zen5", "Podway bf16", "Qwen3.5-4B, bfloat16")
    assert (
        f"after short prompts, Podway has {hybrid:.2f} times llama-server's tokens/s" in published
    )


def test_what_bounds_bfloat16_and_the_first_token_of_128_are_those_of_the_runs() -> None:
    published = (RESULTS / "peers/larger_zen5/README.md").read_text()
    runs = read("peers/larger_zen5/figures.json")
    rates, times = {}, {}
    for program in ("Podway", "vLLM"):
        lone = [
            run["loads"]["128 in"] for run in runs if run["server"] == f"{program} Qwen3-4B, bf16"
        ]
        rates[program] = ", ".join(f"{1 / load['itl_p50']:.1f}" for load in lone)
        eight = [
            run["loads"]["128 in"] for run in runs if run["server"] == f"{program} Qwen3-4B, q8_0"
        ]
        times[program] = f"{median(load['ttft_p50'] for load in eight):.2f}"
    assert f"Podway's rounds have {rates['Podway']}\ntokens/s alone" in published
    assert f"and vLLM's {rates['vLLM']}." in published
    assert f"after {times['Podway']} s, and after\n{times['vLLM']} s from vLLM" in published


def test_what_attention_in_pairs_changed_is_that_of_the_runs_before_and_since() -> None:
    published = (RESULTS / "peers/larger_zen5/README.md").read_text()

    def first(file: str, group: str, load: str = "4,096 in") -> list[float]:
        runs = [run for run in read(f"peers/larger_zen5/{file}.json") if run["group"] == group]
        return [run["loads"][load]["ttft_p50"] for run in runs if load in run["loads"]]

    (long,) = first("before", "Qwen3-4B, q4_0", "16,384 in")
    four, eight, sixteen = (
        median(first("before", f"Qwen3-4B, {name}")) for name in ("q4_0", "q8_0", "bf16")
    )
    assert f"took {long:.0f} s to the first token" in published
    times = f"4,096 tokens {four:.1f} s, in 8 bits {eight:.1f} s, in bfloat16 {sixteen:.1f} s"
    assert times in published
    hybrid = first("before", "Qwen3.5-4B, q4_k_m")
    assert f"Qwen3.5-4B took {min(hybrid):.0f} to {max(hybrid):.0f} s" in published


def test_llama_server_with_openblas_is_that_of_its_run() -> None:
    published = (RESULTS / "peers/larger_zen5/README.md").read_text()
    (run,) = read("peers/larger_zen5/openblas.json")
    four, sixteen = (f"{run['loads'][load]['output_rate']:.1f}" for load in ("C=4", "C=16"))
    assert f"C=4 and C=16 {four} and {sixteen} tokens/s" in published
    times = [run["loads"][load]["ttft_p50"] for load in ("128 in", "1,024 in", "4,096 in")]
    one, two, three = (f"{seconds:.1f}" if seconds < 99 else f"{seconds:.0f}" for seconds in times)
    assert f"128, 1,024 and 4,096 tokens after {one}, {two} and {three} s" in published


def test_rounds_of_podway_alone_agree_where_memory_does_not_decide() -> None:
    published = (RESULTS / "peers/larger_zen5/README.md").read_text()
    eight, *sixteen = [run["loads"] for run in read("peers/larger_zen5/alone.json")]
    rates = [f"{loads['C=16']['output_rate']:.1f}" for loads in (eight, *sixteen)]
    assert f"C=16 {rates[0]}, {rates[1]} and {rates[2]} tokens/s" in published
    times = [f"{loads['4,096 in']['ttft_p50']:.1f}" for loads in (eight, *sixteen)]
    assert f"4,096 tokens {times[0]}, {times[1]} and {times[2]} s" in published
    gigabytes = [4.02, 8.05, 8.05]  # that a token reads
    reads = [
        size / loads["128 in"]["itl_p50"]
        for size, loads in zip(gigabytes, (eight, *sixteen), strict=True)
    ]
    assert (
        f"at {reads[0]:.0f} and, in bfloat16, at {reads[2]:.0f} to {reads[1]:.0f} GB/s" in published
    )
