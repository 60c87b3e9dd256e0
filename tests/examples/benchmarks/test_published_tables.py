import re
import tomllib
from pathlib import Path
from statistics import fmean, median
from types import ModuleType

import pytest

from examples.benchmarks.layers import fractions, step_kernels
from examples.benchmarks.peers import tables
from examples.benchmarks.peers.loads import read_loads
from examples.benchmarks.server import itl_goal, lone_stream
from examples.benchmarks.virtual_time.policy_tables import report_on
from tests.examples.benchmarks.published import RESULTS, plain, read


def test_the_page_about_policies_is_that_of_its_runs() -> None:
    folder = RESULTS / "policies"
    assert (folder / "README.md").read_text() == report_on(folder)


def test_the_page_about_itl_goals_is_that_of_its_runs() -> None:
    folder = RESULTS / "itl_goal"
    assert (folder / "README.md").read_text() == itl_goal.page_of(itl_goal.results_in(folder))


# Beside other servers


@pytest.mark.parametrize(
    ("name", "page", "figures"),
    [
        ("m500_zen5", "README.md", "figures.json"),
        ("m500_avx2", "README.md", "figures.json"),
        ("third_edition", "README.md", "figures.json"),
        ("low_bit_avx2", "README.md", "figures.json"),
        ("hybrid_avx2", "README.md", "figures.json"),
        ("bfloat16_avx2", "README.md", "figures.json"),
        ("m500_amx", "README.md", "figures.json"),
        ("m500_amx_long", "README.md", "figures.json"),
        ("m500_amx_openblas", "README.md", "figures.json"),
        ("m500_avx512", "README.md", "figures.json"),
        ("m500_avx512", "zen4.md", "zen4.json"),
    ],
)
def test_the_tables_of_servers_are_those_of_their_rounds(
    name: str, page: str, figures: str, tmp_path: Path
) -> None:
    folder = RESULTS / "peers" / name
    servers = folder / "servers.toml"
    loads = read_loads(tomllib.loads(servers.read_text()), tmp_path)
    made = tables.page(servers, read(f"peers/{name}/{figures}"), loads)
    assert made[made.index("## ") :] in (folder / page).read_text()


def test_what_a_prefix_cache_knew_of_loads_is_that_of_its_rounds() -> None:
    page, rounds = (RESULTS / "peers" / "README.md").read_text(), read("peers/seeds.json")
    for name in ("one seed", "own prompts"):
        runs = [one["loads"] for one in rounds if one["prompts"] == name]
        rates = [
            median(run[load]["output_rate"] for run in runs) for load in ("C=1", "C=8", "C=32")
        ]
        ttft = 1e3 * median(run["C=32"]["ttft_p50"] for run in runs)
        one, eight, many = rates
        assert f"| {name} | {one:.1f} | {eight:.0f} | {many:.0f} | {ttft:,.0f} |" in page


def test_the_lone_streams_in_float32_are_those_of_their_rounds() -> None:
    page = (RESULTS / "peers" / "m500_avx512" / "README.md").read_text()
    rounds = read("peers/m500_avx512/lone_float32.json")
    for name in ("Podway float32", "llama-server f32", "OpenVINO f32"):
        loads = [one["loads"]["C=1"] for one in rounds if one["server"] == name]
        rates = [load["output_rate"] for load in loads]
        rate = f"{median(rates):.1f} ({min(rates):.1f}–{max(rates):.1f})"
        ttft = f"{1e3 * median(load['ttft_p50'] for load in loads):.0f}"
        assert f"| {name} | {rate} | {ttft} |" in page


def test_what_the_bound_on_prompts_costs_32_streams_is_that_of_its_rounds() -> None:
    page = (RESULTS / "peers" / "m500_avx512" / "README.md").read_text()
    rounds = read("peers/m500_avx512/prefill_slowdown.json")
    for factor in (2, 4, 0):
        cells = []
        for weights in ("int8", "bfloat16"):
            name = f"{weights}, factor {factor}"
            loads = [one["loads"]["C=32"] for one in rounds if one["server"] == name]
            cells += [f"{median(load['output_rate'] for load in loads):.0f}"]
            cells += [f"{1e3 * median(load['ttft_p50'] for load in loads):,.0f}"]
        title = f"factor {factor}" + (" (no bound)" if not factor else "")
        assert f"| {title} | {' | '.join(cells)} |" in page


# LoRA adapters


def test_the_cost_of_lora_adapters_is_that_of_its_run() -> None:
    page = plain((RESULTS / "lora" / "README.md").read_text())
    found = read("lora/figures.json")
    assert f"`{found['command']}`" in page
    assert f"(load average {found['load_average']} on 2 cores)" in page
    for row in found["figures"]:
        ms, weights = row["ms"], row["weights"].partition(" ")[0]
        base, one = (ms["base"] / ms["plain"], ms["one"] / ms["base"])
        if row["step"] == "prefill":
            assert f"| {weights} | {ms['plain']:.0f} ms | {base:.2f} | {one:.2f} |" in page
            continue
        ratios = base, one, ms["mixed"] / ms["base"], ms["merged"] / ms["mixed"]
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        assert f"| {weights} | {row['rows']} | {ms['plain']:.1f} ms | {cells} |" in page


# A streamed token

STREAMED = {
    "bare uvloop `transport.write` of the same bytes, all in a row": "bare write, again",
    "the same with 20 µs between two writes": "bare write, apart",
    "gateway: plan, commit, text, event, write": "gateway",
    "gateway, saturated: unlimited iterations, tokens of a stream merged": "gateway, saturated",
}
PIECES = {
    "plan, with what observers note of it": "plan",
    "commit, with observers": "commit",
    "hand tokens to streams, mock executor": "hand over",
    "text, event, chunk": "text, event, chunk",
    "all": "all",
    "all, with a task woken for every token": "all, a task woken for every token",
}


def test_the_cost_of_a_streamed_token_is_that_of_its_run() -> None:
    found = read("streaming/streaming.json")
    page = plain((RESULTS / "streaming" / "README.md").read_text())
    baseline = fmean(found[name]["microseconds"] for name in ("bare write", "bare write, again"))
    for label, name in STREAMED.items():
        micros, rate = found[name]["microseconds"], found[name]["tokens_per_second"]
        micros = baseline if name == "bare write, again" else micros
        assert f"| {label} | {micros:.1f} | {micros / baseline:.1f} | {rate:,.0f} |" in page


def test_the_pieces_of_a_streamed_token_are_those_of_their_run() -> None:
    found = read("streaming/pieces.json")
    page = plain((RESULTS / "streaming" / "README.md").read_text())
    for label, name in PIECES.items():
        cells = " | ".join(f"{of[name]:.1f}" for of in found.values())
        assert f"| {label} | {cells} |" in page


def test_the_versions_measured_in_turn_are_those_of_their_runs() -> None:
    found = read("streaming/in_turn.json")
    page = plain((RESULTS / "streaming" / "README.md").read_text())
    before, after = found["before"], found["after"]
    first, last = median(before["gateway"]), median(after["gateway"])
    row, apart = (
        median(before[name] + after[name]) for name in ("bare write, in a row", "bare write, apart")
    )
    assert f"{first:.1f} µs before and {last:.1f} µs after" in page
    assert f"medians of {len(before['gateway'])} runs each" in page
    assert f"a bare write in a row took {row:.1f} µs and one apart {apart:.1f} µs" in page
    assert (
        f"{first / apart:.1f} times a write apart, and {last / row:.1f} times one in a row" in page
    )
    merged = (median(each["gateway, saturated"]) for each in (before, after))
    assert "A merged token took {:.1f} and {:.1f} µs".format(*merged) in page


# Page and traces


def test_the_cost_of_page_and_traces_is_that_of_its_run() -> None:
    found = read("streaming/observation.json")
    page = plain((RESULTS / "streaming" / "README.md").read_text())
    assert f"needs {found['loop_ratio']:.2f} times the CPU per token" in page
    assert f"the process {found['process_ratio']:.2f} times" in page
    assert f"(load average {found['load_average']})" in page
    exported = found["tokens_per_second"] / found["tokens_of_a_stream"]
    assert f"exports about {exported:.0f} requests per second" in page
    share = found["live_share_of_loop"]
    of_time = share * found["on_loop_us_per_token"] * found["tokens_per_second"] / 1e6
    assert f"takes {100 * share:.1f} % of the CPU that the loop uses, which is" in page
    assert f"{100 * of_time:.1f} % of the loop's time" in page


def test_the_loop_at_the_pace_of_a_gpu_is_that_of_its_run() -> None:
    found = read("streaming/gpu_pace.json")
    page = plain((RESULTS / "streaming" / "README.md").read_text())
    assert found["command"] in page
    assert f"(load average {found['load_average']})" in page
    streams, wanted = found["streams"], found["streams"] * found["rate"]
    assert f"{found['rate']} steps and {wanted:,} tokens" in page
    paced, most = found["figures"]["gateway"], found["figures"]["gateway, saturated"]
    for row in (paced, most):
        micros, rate = row["microseconds"], f"{row['tokens_per_second']:,.0f}"
        assert f"| {micros:.1f} | {micros * streams / 1e3:.1f} ms | {rate} |" in page
    assert f"renders {most['tokens_per_second'] / wanted:.1f} times the tokens" in page


# Windows and recurrent states


def test_the_memory_of_windows_is_that_of_its_run() -> None:
    page = plain((RESULTS / "layer_kinds" / "README.md").read_text())
    found = read("layer_kinds/memory.json")
    assert f"a prompt of {found['context']:,} tokens in chunks of {found['chunk']}" in page
    for name, row in found["models"].items():
        sizes = f"{row['mib_without_windows']:,.0f} MiB | {row['mib']:,.0f} MiB"
        assert f"| {name} |" in page
        assert f" | {sizes} | {row['ratio']:.1f} × |" in page, name


def test_the_reuse_of_a_hybrid_chat_is_that_of_its_run() -> None:
    page = plain((RESULTS / "layer_kinds" / "README.md").read_text())
    found = read("layer_kinds/chat.json")
    assert f"{100 * found['share_computed']:.1f} % of the prompts' tokens were computed" in page
    assert f"{100 * found['share_new']:.1f} % were new" in page
    assert f"{found['ttft_ratio']:.1f} times shorter" in page
    assert f"load average {found['load']:.1f}" in page
    both = zip(found["cached"], found["uncached"], strict=True)
    for turn, (cached, uncached) in enumerate(both, 1):
        tokens, without = cached["prompt_tokens"], uncached["cached_tokens"]
        assert uncached["prompt_tokens"] == tokens
        assert (
            f"| {turn} | {tokens} | {tokens - cached['cached_tokens']} | {tokens - without} |"
            in page
        )


def test_chats_beside_llama_server_are_those_of_the_run() -> None:
    page = plain((RESULTS / "layer_kinds" / "README.md").read_text())
    found = read("layer_kinds/beside_llama_server.json")
    assert f"beside llama-server, load average {found['load']:.1f}" in page
    for name, row in found["chats"].items():
        first = {"two in turns": 2}.get(name, 1)
        total = sum(row["prompt"][first:])
        own, other = (100 * sum(row[key][first:]) / total for key in ("podway", "llama_server"))
        new = 100 * 100 * len(row["prompt"][first:]) / total
        assert f"| {name} | {total:,} | {new:.1f} % | {own:.1f} % | {other:.1f} % |" in page, name


def test_the_speed_of_a_whole_mixture_is_that_of_its_run() -> None:
    page = plain((RESULTS / "experts" / "README.md").read_text())
    found = read("experts/olmoe_whole.json")
    assert f"a whole {found['shape']}, {found['parameters'] / 1e9:.2f} G random parameters" in page
    assert f"({found['all_bytes'] / 1e9:.1f} GB), one request" in page
    before, after = found["load"]
    assert f"load average {before:.1f} and {after:.1f} before and after" in page
    rate, share = found["read_bytes_per_second"], found["share_of_read_rate"]
    assert f"takes {found['milliseconds']:.1f} ms of CPU time" in page
    assert f"is {100 * share:.0f} % of the read rate ({rate / 1e9:.1f} GB/s)" in page
    assert f"it reads {found['step_bytes'] / 1e9:.2f} GB" in page


# Behind routers


def test_the_table_of_routers_is_that_of_its_runs() -> None:
    page = plain((RESULTS / "routers" / "README.md").read_text())
    for run in read("routers/routers.json"):
        cells = [
            run["router"],
            f"{run['answered']} of {run['sent']}",
            f"{100 * run['cached_share']:.1f} %",
            f"{1e3 * run['cancel_seconds']:.0f} ms",
            *(
                f"{run[key]['failed']:,} of {run[key]['requests']:,}"
                for key in ("killed", "drained")
            ),
        ]
        assert f"| {' | '.join(cells)} |" in page


# The disk tier


def test_the_time_to_first_token_after_a_restart_is_that_of_its_run() -> None:
    page = plain((RESULTS / "disk_tier" / "README.md").read_text())
    medians = read("disk_tier/disk_tier.json")["medians"]
    assert f"`--disk-kv` | {1e3 * medians['after_restart']:.0f} ms |" in page
    assert f"without | {1e3 * medians['after_restart_without']:.0f} ms |" in page
    assert f"| next message | {1e3 * medians['next_message']:.0f} ms |" in page


# Fractions of the machine's limits


def test_each_page_of_fractions_is_that_of_its_runs() -> None:
    for path in (RESULTS / "offline").glob("*/figures.json"):
        page = fractions.page(read(str(path.relative_to(RESULTS))))
        assert path.with_name("README.md").read_text() == page


def test_fractions_name_the_limit_of_each_step() -> None:
    row = {"kind": "decode", "num_requests": 1, "num_tokens": 1, "seconds": 0.012, "fraction": 0.9}
    row["read_rate"] = 41.26e9
    prefill = {**row, "kind": "prefill", "num_tokens": 128, "bound": "compute"}
    run = {
        "rows": [{**row, "bound": "read"}, prefill],
        "load": [0.1, 1.2],
        "limits": {"read": {"rate": 48.5e9}, "int8": {"rate": 9e11}},
    }
    page = fractions.page({"cpu": "Zen", "cores": 2, "shape": "M500", "runs": {"int8": run}})
    assert "| | 1 row | prefill 128 |" in page
    assert "| int8 | 90 % read | 90 % compute |" in page
    assert "follows from 900 Gint8 operations/s. Windows of 128 MiB were read at 48.5 GB/s" in page
    assert "| int8 | 41.3 | 41.3 |" in page


# Where the time of a step goes


@pytest.mark.parametrize("module", [step_kernels, lone_stream])
def test_each_page_about_steps_is_that_of_its_run(module: ModuleType) -> None:
    name = module.__name__.rpartition(".")[2]
    paths = list((RESULTS / "offline").glob(f"*/{name}.json"))
    assert paths
    for path in paths:
        page = module.page(read(str(path.relative_to(RESULTS))))
        assert path.with_suffix(".md").read_text() == page


def of_the_limit(path: str) -> list[list[int]]:
    """The percentages of each format, from 1 row to prompts of 512."""
    lines = step_kernels.page(read(path)).splitlines()
    rows = [line for line in lines if line.startswith("| of the limit")]
    return [[int(each) for each in re.findall(r"(\d+) %", row)] for row in rows]


def test_the_note_on_steps_of_a_larger_model_is_that_of_its_runs() -> None:
    page = plain((RESULTS / "offline" / "README.md").read_text())
    (before,) = of_the_limit("offline/qwen3_4b_zen5/int8_before.json")
    int8, bfloat16, int4 = of_the_limit("offline/qwen3_4b_zen5/step_kernels.json")
    reads = [*int8[:4], *bfloat16[:4]]
    assert f"reads at {min(reads)} to {max(reads)} % in int8 and bfloat16 up to 8 rows" in page
    assert f"int8 had {before[6]} % in a prompt of 128 tokens minutes before" in page
    assert f"then {int8[6]} %" in page
    assert max(bfloat16) > 100
    assert max(int4[2:4]) < 75


def test_the_note_on_steps_is_that_of_its_runs() -> None:
    page = plain((RESULTS / "offline" / "README.md").read_text())
    rates = read("offline/m500_avx512/page_sizes.json")["rates"]
    small, huge = rates["anonymous"]["median"], rates["anonymous, huge"]["median"]
    assert f"{small:.1f} GB/s in pages of 4 KiB and {huge:.1f} in huge pages" in page
    assert f"a mapped file {rates['file']['median']:.1f}" in page
    runs = read("offline/m500_avx512/panel_prefetch.json")
    (was, was_bf16), (now, now_bf16) = (
        [runs[when][name]["linears"] / runs[when][name]["read"] for name in ("int8", "bfloat16")]
        for when in ("before", "after")
    )
    assert f"took {was:.2f} times as long as plain reads with one stream in int8" in page
    assert f"and {was_bf16:.2f} times in bfloat16; they take {now:.2f} and {now_bf16:.2f}" in page


def test_the_last_round_of_the_small_shape_is_described_by_its_figures() -> None:
    published = (RESULTS / "peers/m500_zen5/README.md").read_text()
    runs = read("peers/m500_zen5/figures.json")
    own = [run["loads"] for run in runs if run["server"] == "Podway int8"]
    other = [run["loads"] for run in runs if run["server"] == "vLLM zentorch W8A8 bfloat16"][-1]
    rates = [f"{loads['C=32']['output_rate']:.0f}" for loads in (*own, other)]
    times = [f"{loads['C=1']['ttft_p50'] * 1e3:.0f}" for loads in (*own, other)]
    assert f"{rates[2]} tokens/s (vLLM {rates[3]})" in published
    assert f"after {times[2]} ms (vLLM {times[3]})" in published
    assert f"had {rates[0]} and {rates[1]}\ntokens/s and {times[0]} and {times[1]} ms" in published
