"""What the comparison of larger models starts, and what it says that it leaves out."""

from pathlib import Path

from adapters.models.named_shapes import SHAPES
from examples.benchmarks.peers.larger import MODELS, loads, plan
from examples.benchmarks.peers.tables import page

GIB = 1 << 30


def test_every_larger_model_is_a_named_shape() -> None:
    assert {each.name for each in MODELS} <= SHAPES.keys()


def test_a_gguf_file_is_served_by_podway_and_by_llama_server(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "Qwen3-4B-q4_0.gguf").touch()
    (tmp_path / "ov" / "Qwen3-4B-int8").mkdir(parents=True)
    servers, missing = plan(list(MODELS[:1]), tmp_path, 20 * GIB)
    assert [each.name for each in servers] == [
        "Podway Qwen3-4B, q4_0",
        "llama-server Qwen3-4B, q4_0",
        "Podway Qwen3-4B, q8_0",
        "OpenVINO Qwen3-4B, q8_0",
        "Podway Qwen3-4B, bf16",
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


def test_a_table_has_a_column_for_each_load() -> None:
    run = {"output_rate": 8.4, "ttft_p50": 2.5, "wall_seconds": 9.0, "other_cpu_seconds": 0.1}
    one = {
        "round": 0,
        "server": "Podway",
        "group": "Qwen3-4B, q4_0",
        "first_token_seconds": 3.0,
        "pss_mib_at_start": 2500,
        "pss_mib_after": 2900,
        "loads": {load.name: run for load in loads()},
    }
    text = page("peers", [one], loads())
    for name in ("128 in", "4,096 in", "16,384 in", "C=4", "C=16"):
        assert f"{name} tokens/s" in text
        assert f"{name} TTFT p50 ms" in text
    assert "2,900" in text
