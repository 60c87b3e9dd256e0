"""The Grafana dashboard and the Prometheus rules use metrics that a server exposes.

A real Prometheus runs every query where one is installed (Debian's package `prometheus`).
"""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.examples.running import EXAMPLES, run

FOLDER = EXAMPLES / "observability"
RULES_TEST = Path(__file__).parent / "prometheus_rules.yml"
INTERVAL = 0.2  # seconds between two scrapes in the test
DEADLINE = 60.0


class Query(NamedTuple):
    """An expression and where it is used."""

    place: str
    expression: str


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "grafana" / "dashboard.json").read_text())
    return found


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def panels() -> list[Query]:
    return [
        Query(panel["title"], target["expr"].replace("$__rate_interval", "5s"))
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]


def queries() -> list[Query]:
    return panels() + [
        Query(str(rule.get("record", rule.get("alert"))), rule["expr"]) for rule in rules()
    ]


# What vLLM's dashboards query (github.com/vllm-project/vllm, examples/observability:
# prometheus_grafana/grafana.json, dashboards/grafana/{performance,query}_statistics.json, and the
# panels of dashboards/grafana/vllm_{overview,kv_cache}.json that every deployment has).
VLLM_DASHBOARDS = (
    "http_requests_total",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
)


def exposed(url: str) -> dict[str, list[dict[str, str]]]:
    """The label sets of each series on /metrics, by name."""
    with urllib.request.urlopen(f"{url}/metrics") as page:
        text = page.read().decode()
    found: dict[str, list[dict[str, str]]] = {}
    for name, labels in re.findall(r"^([\w:]+)(?:\{([^}]*)\})? ", text, re.MULTILINE):
        found.setdefault(name, []).append(dict(re.findall(r'(\w+)="([^"]*)"', labels)))
    return found


def test_every_query_selects_series_that_the_server_exposes(server_url: str) -> None:
    with urllib.request.urlopen(f"{server_url}/health"):  # the first series of HTTP requests
        series = exposed(server_url)
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for place, expression in queries():
        selectors = re.findall(r"\b(podway[_:][\w:]+)(?:\{([^}]*)\})?", expression)
        assert selectors or "up{" in expression, place
        for name, matchers in selectors:
            if name in recorded:
                continue
            wanted = dict(re.findall(r'(\w+)="([^"]*)"', matchers)).items()
            assert any(wanted <= labels.items() for labels in series.get(name, [])), (place, name)


def test_every_metric_of_the_server_is_on_the_dashboard(server_url: str) -> None:
    shown = " ".join(query.expression for query in panels())
    names = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in exposed(server_url)
        if name.startswith("podway_")
    }
    assert {name for name in names if name not in shown} == set()


def test_dashboards_made_for_vllm_have_no_empty_panel(server_url: str) -> None:
    with urllib.request.urlopen(f"{server_url}/health"):
        pass  # so that there is an HTTP request to count
    series = exposed(server_url)
    assert [name for name in VLLM_DASHBOARDS if name not in series] == []
    for name in VLLM_DASHBOARDS:
        if name.startswith("vllm:"):
            assert all(labels["model_name"] == "builtin" for labels in series[name]), name
    reasons = {labels["reason"] for labels in series["vllm:num_requests_waiting_by_reason"]}
    assert reasons == {"capacity", "deferred"}
    reasons = {labels["finished_reason"] for labels in series["vllm:request_success_total"]}
    assert {"stop", "length"} <= reasons


def test_the_panels_have_distinct_ids_and_do_not_overlap() -> None:
    found = dashboard()["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    cells = [
        (at["x"] + column, at["y"] + line)
        for at in (panel["gridPos"] for panel in found)
        for column in range(at["w"])
        for line in range(at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(column for column, _ in cells) < 24


def test_alerts_fire_on_series_that_should_raise_them(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    shutil.copy(RULES_TEST, tmp_path)
    assert "SUCCESS" in run("promtool", "test", "rules", tmp_path / RULES_TEST.name)


@pytest.fixture
def prometheus(server_url: str, tmp_path: Path) -> Iterator[str]:
    """A Prometheus with our configuration, but for the address and the interval."""
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed")
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [
        urllib.parse.urlsplit(server_url).netloc
    ]
    shutil.copy(FOLDER / "rules.yml", tmp_path)
    path = tmp_path / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [f"--config.file={path}", f"--web.listen-address={address}"]
    flags += [f"--storage.tsdb.path={tmp_path / 'data'}", "--log.level=error"]
    with subprocess.Popen(["prometheus", *flags]) as process:
        try:
            yield f"http://{address}"
        finally:
            process.kill()


def ask(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """The result of an instant query; raises on an invalid one, is empty before the start."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}") as reply:
            found: list[dict[str, Any]] = json.loads(reply.read())["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # not yet ready
            return []
        raise AssertionError(f"{expression}: {error.read().decode()}") from None
    except OSError:  # not yet listening
        return []
    return found


def wait_for(prometheus: str, expression: str) -> list[dict[str, Any]]:
    """The result of a query as soon as it has one."""
    until = time.monotonic() + DEADLINE
    while not (found := ask(prometheus, expression)):
        assert time.monotonic() < until, f"no result: {expression}"
        time.sleep(INTERVAL)
    return found


def test_a_real_prometheus_answers_every_query(prometheus: str) -> None:
    wait_for(prometheus, "count_over_time(podway_iterations_total[5s]) > 5")
    for place, expression in panels():
        assert ask(prometheus, expression), place
    for rule in rules():
        if "record" in rule:
            assert wait_for(prometheus, rule["record"])
        else:
            ask(prometheus, rule["expr"])  # valid; an empty result means that it does not fire
