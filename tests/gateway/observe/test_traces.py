"""OpenTelemetry export to a collector on a real port: spans, phases, a slow collector."""

import importlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from engine.errors import StartupError
from gateway.observe import traces
from gateway.observe.metrics import Metrics
from gateway.observe.timelines import Wait
from gateway.observe.traces import Traces
from tests.gateway.rig import STEP, TEXT, Rig, Setting, play, played, text

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(ThreadingHTTPServer):
    """Keeps all exported spans; while `gate` is closed, requests are not answered."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.gate.wait(30)
        self.server.paths.add(self.path)
        if self.path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is written to stderr."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.gate.set()
        server.shutdown()


def values(span: Any) -> dict[str, Any]:
    """The attributes of a span; numbers and strings only."""
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, kind) if kind else None
    return found


def traced(collector: Collector, **headers: str) -> None:
    """One completion of 3 tokens, exported."""

    async def scene(rig: Rig) -> None:
        exporter = Traces(collector.url, "model", rig.service.clock, Metrics())
        object.__setattr__(rig.service, "traces", exporter)
        rig.service.timelines.report_to(exporter)
        body = text(prompt="abcd", max_tokens=3, ignore_eos=True)
        await rig.client.post(TEXT, body, {"x-request-id": "one", **headers})
        exporter.close()

    play(scene, Setting())


def test_a_request_is_one_server_span_with_its_phases_as_children(collector: Collector) -> None:
    traced(collector)
    (server,) = [span for span in collector.spans if span.kind == 2]
    children = [span for span in collector.spans if span.parent_span_id == server.span_id]
    assert [span.name for span in children] == ["prefill", "decode"]
    found = values(server)
    assert found["gen_ai.usage.input_tokens"] == 4
    assert found["gen_ai.usage.output_tokens"] == 3
    assert found["gen_ai.request.model"] == "model"
    assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(STEP)
    assert found["gen_ai.latency.e2e"] == pytest.approx(3 * STEP)
    lasted = server.end_time_unix_nano - server.start_time_unix_nano
    assert lasted == pytest.approx(3 * STEP * 1e9, rel=1e-6)
    assert collector.paths == {"/v1/traces", "/v1/metrics"}


def test_the_callers_trace_is_continued(collector: Collector) -> None:
    traced(collector, traceparent=PARENT)
    (server,) = [span for span in collector.spans if span.kind == 2]
    assert server.trace_id.hex() == PARENT.split("-")[1]
    assert server.parent_span_id.hex() == PARENT.split("-")[2]


@pytest.mark.parametrize("is_late", [False, True])
@played()
async def test_times_in_which_the_client_did_not_read_are_children(
    rig: Rig, collector: Collector, is_late: bool
) -> None:
    exporter = Traces(collector.url, "model", rig.service.clock, Metrics())
    rig.service.timelines.report_to(exporter)
    wait = Wait(began=0.5, seconds=2.0)
    if not is_late:
        rig.service.timelines.reader_waits.add("slow", wait)
    await rig.client.post(TEXT, text(), {"x-request-id": "slow"})
    if is_late:  # the response went on after the engine's last token
        rig.service.timelines.reader_waits.add("slow", wait)
    exporter.close()
    (server,) = [span for span in collector.spans if span.kind == 2]
    (reader,) = [span for span in collector.spans if span.name == "reader"]
    assert reader.parent_span_id == server.span_id
    assert reader.end_time_unix_nano - reader.start_time_unix_nano == 2_000_000_000


@played()
async def test_a_slow_collector_costs_traces_and_nothing_else(
    rig: Rig, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "MAX_QUEUE", 2)
    monkeypatch.setattr(traces, "MAX_BATCH", 1)
    metrics = Metrics()
    exporter = Traces(collector.url, "model", rig.service.clock, metrics)
    rig.service.timelines.report_to(exporter)
    collector.gate.clear()
    for _ in range(10):
        exchange = await rig.client.post(TEXT, text(prompt="a", max_tokens=1))
        assert exchange.status == 200
    assert metrics.num_dropped_traces >= 7  # 2 wait, at most 1 is being exported
    collector.gate.set()
    exporter.close()


def test_without_the_packages_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(StartupError, match=r"--otlp-endpoint needs .*podway\[otel\]"):
        Traces("http://127.0.0.1:1", "model", lambda: 0.0, Metrics())
