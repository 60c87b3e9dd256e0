import json
import shutil
import sys
from pathlib import Path
from random import Random

import pytest

from adapters.models.random_checkpoint import random_checkpoint
from adapters.tokenizers import load_token_table
from engine.research.hardware.catalogue import Deployment
from engine.research.leaping import run as capacity
from examples.benchmarks.pipeline import __main__ as pipeline
from examples.benchmarks.pipeline import measured
from examples.benchmarks.speculation import engines, servers
from examples.benchmarks.speculation.texts import TEXTS
from tests.examples.running import ROOT, run_here, run_module


def test_iteration_and_request_level_scheduling_are_measured_on_a_real_server() -> None:
    shown = run_module(
        "benchmarks.server.iteration_against_request",
        *("--rates", "40", "--seconds", "0.5", "--output-tokens", "1..8"),
    )
    heads, row = shown.splitlines()[:2]
    assert "grow req/s, ms/token" in heads
    assert "request req/s, ms/token" in heads
    assert all(float(cell) > 0 for cell in row.split())


def test_a_streamed_token_is_compared_with_a_bare_write(tmp_path: Path) -> None:
    profile = tmp_path / "profile.txt"
    load = ("--streams", "1", "--seconds", "0.3", "--settle", "0.1")
    shown = run_module("benchmarks.server.streaming_cost", *load, "--profile", profile)
    assert {"bare write", "gateway"} <= {line[:20].strip() for line in shown.splitlines()}
    assert "scheduler.py" in profile.read_text()


def test_the_pieces_of_a_streamed_token_are_measured_over_connections_to_nowhere() -> None:
    shown = run_module("benchmarks.server.token_pieces", "--streams", "2", "--rounds", "1")
    rows = [line.partition(" {")[0] for line in shown.splitlines()]
    assert rows == ["without a pause", "25 ms between iterations"]
    assert shown.count("'text, event, chunk'") == shown.count("woken for every token") == 2


def test_decisions_are_measured_in_a_whole_server(tmp_path: Path) -> None:
    load = ("--questions", "1,4", "--words", "40", "--rounds", "1")
    run_here("benchmarks.server.decisions", "builtin", *load, "--out", tmp_path / "decisions")
    _, one, four = json.loads((tmp_path / "decisions" / "decisions.json").read_text())
    assert (one["questions"], four["questions"]) == (1, 4)
    assert one["computed"] < four["computed"] < 4 * one["computed"]  # the input is computed once
    assert (one["iterations"], four["iterations"]) == (2, 2)


def test_a_quantized_model_reads_the_texts_of_float32() -> None:
    formats, few = ("--weights", "int8", "--kv-cache-dtype", "bfloat16"), ("--texts", "8")
    shown = run_here("benchmarks.layers.quantization_quality", "--tokens", "4", *few, *formats)
    figures = dict(line.rsplit("  ", 1) for line in shown.splitlines() if "  " in line)
    assert 1e-12 < float(figures["divergence, mean   "].split()[0]) < 0.01
    assert shown.splitlines()[-2].endswith("%")


def test_speculation_is_measured_off_and_on_and_changes_no_token(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    flags = ("--texts", "loops", "--clients", "2", "--rounds", "1", "--threads", "1")
    run_here("benchmarks.speculation.engines", *flags, "--clock", "cpu", "--out", file)
    rows = json.loads(file.read_text())
    assert [row["method"] for row in rows] == ["off", "ngram", "suffix"]
    assert all(row["same_tokens"] and row["off"] > 0 for row in rows)
    assert all(0 <= row["accepted"] <= row["drafts"] for row in rows)  # how many, speed decides


def test_speculation_is_measured_in_whole_servers_and_changes_no_text(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    flags = ("--texts", "loops", "--clients", "2", "--rounds", "1", "--out", file)
    shown = run_here("benchmarks.speculation.servers", *flags)
    rows = json.loads(file.read_text())
    assert servers.table(rows) in shown
    assert [row["method"] for row in rows] == ["ngram", "off"]
    assert all(row["same_text"] and row["output_tokens"] == 4 * 64 for row in rows)


def test_the_acceptance_of_a_trained_mtp_layer_is_measured(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "mtp.json"
    run_here("benchmarks.mtp.train", *("--out", model, "--steps", "2", "--batch-tokens", "512"))
    load = ("--requests", "2", "--rounds", "1", "--drafts", "2", "--inner", "1024")
    shown = run_here("benchmarks.mtp.acceptance", model, *load, "--out", file)
    assert shown.strip() == file.with_suffix(".md").read_text().strip()
    found = json.loads(file.read_text())
    for row in found["acceptance"]:
        assert row["drafts"] >= row["accepted"] == sum(row["by_position"])
    assert all(row["same_tokens"] for key in ("acceptance", "speed") for row in found[key])


def test_lora_adapters_are_measured_in_a_whole_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.benchmarks.layers.lora.NUM_LORAS", 1)
    load = ("--streams", "2", "--output-tokens", "4", "--rounds", "1", "--shape", "TINY")
    shown = run_here("benchmarks.server.lora_server", *load, "--out", tmp_path)
    assert shown.strip() == (tmp_path / "server.md").read_text().strip()
    kinds = json.loads((tmp_path / "server.json").read_text())["kinds"]
    assert all(kinds[name]["tokens_per_second"] > 0 for name in ("plain", "base", "mixed"))


def test_the_page_of_speculation_has_the_tables_of_its_figures() -> None:
    folder = ROOT / "examples" / "benchmarks" / "results" / "speculation"
    page = (folder / "README.md").read_text()
    for name in ("figures.json", "larger.json"):
        rows = json.loads((folder / name).read_text())
        assert engines.table(rows) in page
        assert all(row["same_tokens"] for row in rows)
    rows = json.loads((folder / "servers.json").read_text())
    assert servers.table(rows) in page
    assert all(row["same_text"] for row in rows)


def test_speculation_was_not_measured_to_be_slower_by_more_than_two_per_cent() -> None:
    file = ROOT / "examples" / "benchmarks" / "results" / "speculation" / "figures.json"
    rows = json.loads(file.read_text())
    assert {row["clients"] for row in rows} == {1, 8, 32, 64}
    assert {row["text"] for row in rows} == set(TEXTS)
    assert all(row["ratio"] >= 0.98 for row in rows)


def test_a_lone_stream_of_edited_text_was_measured_to_be_three_times_as_fast() -> None:
    folder = ROOT / "examples" / "benchmarks" / "results" / "speculation"
    for name in ("figures", "servers"):
        rows = json.loads((folder / f"{name}.json").read_text())
        found = [row for row in rows if (row["text"], row["clients"]) == ("edit", 1)]
        assert [row["ratio"] >= 3 for row in found if row["method"] == "prediction"] == [True]


def test_the_edited_text_of_random_weights_has_the_tokens_of_the_output() -> None:
    table, words = load_token_table(random_checkpoint("M110")), servers.words_of_one_token()
    output = Random(1).choices(words, k=500)
    text = b"".join([table.tokens[token] for token in output]).decode()
    assert table.encode(text) == output


def test_attention_is_timed_with_every_kv_dtype() -> None:
    few = ("--seconds", "0.001", "--contexts", "16", "--batch", "2")
    shown = run_here("benchmarks.layers.attention_speed", *few).splitlines()
    assert shown[0].split(" | ")[2:-1] == ["float32", "float16", "bfloat16", "int8"]
    assert len(shown) == 2 + 3 * 2


def test_orcas_headline_is_written_as_table_plot_and_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deployment, "num_slots", 1 << 12)  # fewer to make for each run
    monkeypatch.setattr(capacity, "_MAX_DOUBLINGS", 4)  # which two requests survive
    run_here("benchmarks.virtual_time.orca", "--out", tmp_path, "--requests", "2")
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "orca.json", "orca.png"}


def test_fastserves_headline_is_written_as_table_plot_and_figures(tmp_path: Path) -> None:
    flags = ("--out", tmp_path, "--requests", "4")
    shown = run_here("benchmarks.virtual_time.fastserve", *flags)
    files = {"README.md", "fastserve.json", "fastserve.png"}
    assert {path.name for path in tmp_path.iterdir()} == files
    assert "| MLFQ, 30 s |" in shown


def test_policies_are_compared_over_seeds_as_table_plot_and_figures(tmp_path: Path) -> None:
    flags = ("--out", tmp_path, "--requests", "12", "--seeds", "2", "--cases", "alike", "swapping")
    shown = run_here("benchmarks.virtual_time.policies", *flags)
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md",
        "policies.json",
        "policies.png",
    }
    assert "| outputs alike | 9 | mlfq |" in shown
    assert "| split, skewed | 12 | mlfq, recompute |" in shown


def test_a_large_tenant_is_played_beside_small_ones_under_each_policy(tmp_path: Path) -> None:
    flags = ("--out", tmp_path, "--requests", "40", "--seeds", "2")
    shown = run_here("benchmarks.virtual_time.tenants", *flags)
    assert [path.name for path in tmp_path.iterdir()] == ["tenants.json"]
    for load in (8, 12):
        for policy in ("fcfs", "fcfs, --fair-keys"):
            assert f"| {load} | {policy} |" in shown


def test_the_cost_of_a_plan_is_measured_for_every_policy(tmp_path: Path) -> None:
    flags = ("--out", tmp_path, "--waiting", "2000", "--plans", "5")
    shown = run_here("benchmarks.virtual_time.plan_cost", *flags)
    assert "| deadline | " in shown


def test_the_cost_of_a_step_is_measured_for_every_case(tmp_path: Path) -> None:
    flags = ("--out", tmp_path, "--output", "20", "--plans", "5", "--policies", "mlfq")
    shown = run_here("benchmarks.virtual_time.step_cost", *flags)
    assert {path.name for path in tmp_path.iterdir()} == {"step_cost.json", "step_cost.md"}
    assert shown.count("(p99 ") == 5


def test_a_trace_played_twice_gives_identical_figures() -> None:
    sample = ROOT / "tests" / "data" / "azure_2023_conv_first_1000.csv.gz"
    assert "identical" in run_here("benchmarks.virtual_time.azure_hour", sample, "--twice")


def test_outputs_under_random_schemas_validate_on_random_weights() -> None:
    shown = run_here("benchmarks.grammar.conformance", "--schemas", "30", "--max-tokens", "100")
    assert int(shown.split("finished and valid")[1].split()[0]) >= 10
    assert "mask of a token, median" in shown


def test_two_grammar_libraries_are_compared() -> None:
    pytest.importorskip("xgrammar")
    few = ("--random", "2", "--vocabulary", "600")
    shown = run_module("benchmarks.grammar.compare_libraries", *few)
    rows = [line for line in shown.splitlines() if line.startswith("| llguidance")]
    assert len(rows) == 2
    assert all(row.split("|")[6].strip() == "0" for row in rows)  # wrong


def test_policies_are_compared_on_the_real_engine(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ("--quick", "6", "--clock", "cpu", "--out", out)
    shown = run_here("benchmarks.real_engine.policies", *flags)
    files = {"README.md", "figures.json", "jct_mlfq.png", "jct_skewed.png"}
    assert {path.name for path in out.iterdir()} == files
    for policy in ("fcfs", "mlfq", "fair", "deadline", "no reuse"):
        assert f"| {policy} |" in shown


def test_the_simulator_is_compared_with_the_real_engine(tmp_path: Path) -> None:
    size = ("--size", "tiny", "--requests", "60", "--loads", "0.5", "0.9")
    flags = ("--clock", "cpu", "--out", tmp_path)
    run_here("benchmarks.real_engine.simulator_accuracy", *size, *flags)
    page = (tmp_path / "README.md").read_text()
    assert page.count("| throughput |") == 1
    assert page.count("| 90% | load with the same mean JCT |") == 1
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [row["requests"] for row in found["rows"]] == [60, 60]
    throughput = found["rows"][0]["errors"]["first fifth"]["quantities"]["throughput"]
    assert abs(throughput["error"]) < 0.5  # both have to serve all arrivals
    assert (tmp_path / "errors.png").read_bytes().startswith(b"\x89PNG")


def test_an_itl_goal_is_compared_with_fixed_budgets(tmp_path: Path) -> None:
    run_here("benchmarks.server.itl_goal", "--requests", "12", "--out", tmp_path)
    run_here("benchmarks.server.itl_goal", "--real", "--tiny", "--requests", "8", "--out", tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert page.count("| ITL p99 at most |") == 2
    assert (tmp_path / "itl_goal.png").exists()


def test_a_pipeline_is_measured_and_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(measured.CONFIG, "num_hidden_layers", 2)
    monkeypatch.setattr(pipeline, "cores_free", lambda: 1.5)
    monkeypatch.setattr(pipeline, "SETUPS", pipeline.SETUPS[::3])
    flags = ["--requests", "2", "--repeats", "1", "--queue", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["pipeline", *flags])
    pipeline.main()
    shown = capsys.readouterr().out
    assert "| **2 stages, two batches of 8 in flight** |" in shown
    assert "| pipelined iterations (Orca) |" in shown
    assert {path.name for path in tmp_path.iterdir()} >= {"README.md", "pipeline.json"}


def traces_in(folder: Path) -> Path:
    """A folder with the beginning of the Azure trace."""
    traces = folder / "traces"
    traces.mkdir()
    sample = ROOT / "tests" / "data" / "azure_2023_conv_first_1000.csv.gz"
    shutil.copy(sample, traces / "azure_2023_conv.csv.gz")
    return traces


def test_routers_are_compared_on_a_simulated_fleet(tmp_path: Path) -> None:
    traces = traces_in(tmp_path)
    size = ("--replicas", "12", "--seconds", "30", "--only", "azure", "--processes", "2")
    run_here("benchmarks.virtual_time.fleet", "--traces", traces, *size, "--out", tmp_path)
    page = (tmp_path / "README.md").read_text()
    found = json.loads((tmp_path / "fleet.json").read_text())["azure"]
    for row in found["rows"]:
        assert f"| {row['router']} |" in page
        assert row["num_finished"] == row["num_arrived"] == found["requests"] > 50
    assert (tmp_path / "azure.png").read_bytes().startswith(b"\x89PNG")


def test_a_fleet_loses_nothing_while_machines_die_and_are_upgraded(tmp_path: Path) -> None:
    traces = traces_in(tmp_path)
    size = ("--replicas", "100", "--seconds", "60", "--only", "outages", "--processes", "2")
    run_here("benchmarks.virtual_time.fleet", "--traces", traces, *size, "--out", tmp_path)
    found = json.loads((tmp_path / "fleet.json").read_text())["outages"]
    (row,) = found["rows"]
    assert row["num_finished"] == row["num_arrived"] == found["requests"] > 50
    assert found["moved"] >= found["pauses"]["count"] > 0
    page = (tmp_path / "README.md").read_text()
    assert f"and 0 were lost. {found['moved']} went on elsewhere" in page


def test_the_largest_fleet_is_compared_with_its_earlier_run(tmp_path: Path) -> None:
    traces = traces_in(tmp_path)
    size = ("--seconds", "2", "--only", "largest", "--largest", "azure")
    for processes in ("1", "2"):
        more = (*size, "--processes", processes, "--out", tmp_path)
        run_here("benchmarks.virtual_time.fleet", "--traces", traces, *more)
    found = json.loads((tmp_path / "fleet.json").read_text())["largest_azure"]
    assert found["replicas"] == 1000
    assert [again["digest"] for again in found["repeated"]] == [found["rows"][0]["digest"]]
    assert "the same digest of all figures" in (tmp_path / "README.md").read_text()
    changed = json.loads((tmp_path / "fleet.json").read_text())
    changed["largest_azure"]["rows"][0]["digest"] = "0"
    (tmp_path / "fleet.json").write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match="but 0 in an earlier run"):
        run_here("benchmarks.virtual_time.fleet", "--traces", traces, *more)
