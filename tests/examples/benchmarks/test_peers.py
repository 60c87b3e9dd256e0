import json
import socket
import sys
import tomllib
from pathlib import Path

from examples.benchmarks.peers.loads import read_loads
from tests.examples.running import run_module

SERVERS = """
ids = "300..1000"

[[closed]]
concurrency = 2
requests = 4
prompt = 8
output = 4

[[azure]]
rate = 20.0
requests = 5
divisor = 20

[[server]]
name = "ours"
group = "built-in"
command = "{python} -m gateway serve --port {port} --cost-model none --log-level error"
port = {port}
model = "builtin"
environment = {{ PODWAY_MAX_BATCH_SIZE = "4" }}
"""


def test_a_server_is_started_loaded_measured_and_stopped(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers = tmp_path / "servers.toml"
    servers.write_text(SERVERS.format(python=sys.executable, port=port))
    shown = run_module("benchmarks.peers", servers, "--rounds", "1", "--out", tmp_path)
    assert "| C=2 tokens/s |" in shown
    assert "| 20 requests/s: tokens/s |" in shown
    figures = json.loads((tmp_path / "figures.json").read_text())
    loads = figures[0]["loads"]
    assert [loads[name]["num_failed"] for name in ("C=2", "20 requests/s")] == [0, 0]
    assert figures[0]["pss_mib_after"] > 0


def test_no_load_has_the_prompts_of_another_which_a_prefix_cache_would_know(
    tmp_path: Path,
) -> None:
    tables = tomllib.loads(SERVERS.format(python="", port=0))
    seeds = [load.flags[load.flags.index("--seed") + 1] for load in read_loads(tables, tmp_path)]
    assert seeds == ["0", "1"]
