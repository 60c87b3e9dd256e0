"""OpenTelemetry: one server span per request with its phases as children, and GenAI metrics.

Spans are built after a request has ended, from its timeline, in a thread: the event loop only puts
the timeline into a bounded queue. If the collector is slow, requests are dropped and counted.
Names follow the OpenTelemetry semantic conventions for generative AI, and vLLM's
`gen_ai.latency.*`.
"""

import contextlib
import importlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from typing import Any, TypeVar

from engine.errors import StartupError
from engine.ports import Clock
from gateway.observe.explanation import phase_seconds, spans_of
from gateway.observe.metrics import Metrics
from gateway.observe.timelines import Timeline, Wait

logger = logging.getLogger(__name__)

MAX_QUEUE = 2048  # ended requests and reader waits that are to be exported
MAX_LABELS = 4096  # requests whose `traceparent`, span or reader waits are remembered
MAX_BATCH = 512  # spans of one HTTP request to the collector
EXPORT_SECONDS = 5.0  # seconds for one attempt
METRICS_SECONDS = 15.0  # between two exports of metrics
NANO = 1_000_000_000
Value = TypeVar("Value")
INSTALL = "pip install 'podway[otel]'"


class Traces:
    """Exports ended requests to an OTLP collector over HTTP. Close it to export what is left."""

    def __init__(self, endpoint: str, model: str, clock: Clock, metrics: Metrics) -> None:
        """Raises `StartupError` if the OpenTelemetry packages are not installed."""
        self._metrics = metrics
        self._model = model
        self._offset = time.time_ns() - int(clock() * NANO)
        self._parents: OrderedDict[str, str] = OrderedDict()
        self._queue: queue.Queue[Timeline | tuple[str, Wait] | None] = queue.Queue(MAX_QUEUE)
        self._exporter = _Exporter(endpoint)
        # Of the thread: contexts of exported spans, and waits of requests that have not ended.
        self._contexts: OrderedDict[str, Any] = OrderedDict()
        self._waits: OrderedDict[str, list[Wait]] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, request_id: str, traceparent: str) -> None:
        """Continue the caller's trace (W3C `traceparent`) in this request's span."""
        _remember(self._parents, request_id, traceparent)

    def ended(self, timeline: Timeline) -> None:
        """Queue an ended request; dropped and counted if the queue is full."""
        try:
            self._queue.put_nowait(timeline)
        except queue.Full:
            self._metrics.num_dropped_traces += 1

    def reader_waited(self, label: str, wait: Wait) -> None:
        """Add a span for a time in which the client did not read. That may be after its request
        ended. Dropped if the queue is full."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait((label, wait))

    def close(self) -> None:
        """Export what is queued, for at most `EXPORT_SECONDS`."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=EXPORT_SECONDS)
        self._thread.join(EXPORT_SECONDS)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            label = item[0] if isinstance(item, tuple) else item.request.spec.label
            try:
                if isinstance(item, tuple):
                    self._export_wait(*item)
                else:
                    self._export(item, self._parents.get(label, ""))
                if self._queue.empty() or self._exporter.num_pending >= MAX_BATCH:
                    self._exporter.flush()
            except Exception:  # a trace must never end the thread
                logger.exception("request %s could not be traced", label)
        self._exporter.close()

    def _export(self, timeline: Timeline, traceparent: str) -> None:
        request, at = timeline.request, self._unix_nanoseconds
        times = request.times
        ended = times.arrived_at if times.ended_at is None else times.ended_at
        found = attributes(timeline, self._model)
        children = [
            (span.phase, at(times.arrived_at + span.start), span.seconds)
            for span in spans_of(timeline, ended)
            if span.seconds > 0
        ]
        label = request.spec.label
        waits = self._waits.pop(label, ())
        children += [("reader", at(wait.began), wait.seconds) for wait in waits]
        name = f"text_completion {self._model}"
        ends = at(times.arrived_at), at(ended)
        context = self._exporter.span(name, ends, found, children, traceparent)
        _remember(self._contexts, label, context)
        self._exporter.measure(timeline, {"gen_ai.request.model": self._model})

    def _export_wait(self, label: str, wait: Wait) -> None:
        if label in self._contexts:
            child = ("reader", self._unix_nanoseconds(wait.began), wait.seconds)
            self._exporter.child(child, self._contexts[label])
        else:
            _remember(self._waits, label, [*self._waits.get(label, ()), wait])

    def _unix_nanoseconds(self, seconds: float) -> int:
        return self._offset + int(seconds * NANO)


def _remember(found: OrderedDict[str, Value], label: str, value: Value) -> None:
    """Set a value; the oldest one is removed if there are more than `MAX_LABELS`."""
    found[label] = value
    if len(found) > MAX_LABELS:
        found.popitem(last=False)


def attributes(timeline: Timeline, model: str) -> dict[str, Any]:
    """The attributes of a request's span. Latencies are in seconds."""
    request = timeline.request
    spec, times = request.spec, request.times
    phases = phase_seconds(timeline, times.ended_at or times.arrived_at)
    found: dict[str, Any] = {
        "gen_ai.operation.name": "embeddings" if spec.is_pooling else "text_completion",
        "gen_ai.provider.name": "podway",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": spec.label,
        "gen_ai.request.id": spec.label,
        "gen_ai.request.max_tokens": spec.max_tokens,
        "gen_ai.request.temperature": spec.sampling.temperature,
        "gen_ai.request.top_p": spec.sampling.top_p,
        "gen_ai.usage.input_tokens": request.prompt_len,
        "gen_ai.usage.output_tokens": request.produced,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached,
        "gen_ai.response.finish_reasons": [request.finish.value] if request.finish else [],
        "gen_ai.latency.time_in_queue": phases.get("queued", 0.0),
        "gen_ai.latency.time_in_model_prefill": phases.get("prefill", 0.0),
        "gen_ai.latency.time_in_model_decode": phases.get("decode", 0.0),
        "podway.outcome": request.outcome,
        "podway.preemptions": request.setbacks.num_preemptions,
        "podway.swaps": request.setbacks.num_swaps,
    }
    if times.ttft is not None:
        found["gen_ai.latency.time_to_first_token"] = times.ttft
    if times.ended_at is not None:
        found["gen_ai.latency.e2e"] = times.ended_at - times.arrived_at
    return found


class _Exporter:
    """The OpenTelemetry SDK: a tracer whose spans are exported by `flush`, and meters."""

    def __init__(self, endpoint: str) -> None:
        try:
            sdk = {
                name: importlib.import_module(f"opentelemetry.{name}")
                for name in (
                    "trace",
                    "sdk.trace",
                    "sdk.trace.export",
                    "sdk.trace.export.in_memory_span_exporter",
                    "sdk.metrics",
                    "sdk.metrics.export",
                    "sdk.resources",
                    "exporter.otlp.proto.http.trace_exporter",
                    "exporter.otlp.proto.http.metric_exporter",
                    "trace.propagation.tracecontext",
                )
            }
        except ImportError as error:
            raise StartupError(
                f"--otlp-endpoint needs OpenTelemetry ({INSTALL}): {error}"
            ) from None
        base = endpoint.rstrip("/")
        resource = sdk["sdk.resources"].Resource.create({"service.name": "podway"})
        self._collector = sdk["exporter.otlp.proto.http.trace_exporter"].OTLPSpanExporter(
            endpoint=f"{base}/v1/traces", timeout=EXPORT_SECONDS
        )
        metrics = sdk["exporter.otlp.proto.http.metric_exporter"].OTLPMetricExporter(
            endpoint=f"{base}/v1/metrics", timeout=EXPORT_SECONDS
        )
        self._pending = sdk["sdk.trace.export.in_memory_span_exporter"].InMemorySpanExporter()
        self._provider = sdk["sdk.trace"].TracerProvider(resource=resource)
        keep = sdk["sdk.trace.export"].SimpleSpanProcessor(self._pending)
        self._provider.add_span_processor(keep)
        self.num_pending = 0  # ended spans
        self._tracer = self._provider.get_tracer("podway")
        self._trace = sdk["trace"]
        self._context = sdk["trace.propagation.tracecontext"].TraceContextTextMapPropagator()
        reader = sdk["sdk.metrics.export"].PeriodicExportingMetricReader(
            metrics, export_interval_millis=METRICS_SECONDS * 1e3
        )
        self._meters = sdk["sdk.metrics"].MeterProvider(resource=resource, metric_readers=[reader])
        meter = self._meters.get_meter("podway")
        self._seconds = {
            name: meter.create_histogram(f"gen_ai.server.{name}", unit="s")
            for name in ("request.duration", "time_to_first_token", "time_per_output_token")
        }
        self._tokens = meter.create_histogram("gen_ai.client.token.usage", unit="{token}")

    def span(
        self,
        name: str,
        times: tuple[int, int],
        found: dict[str, Any],
        children: list[tuple[str, int, float]],
        traceparent: str,
    ) -> Any:
        """End a server span and its children; returns its context. Times are Unix nanoseconds."""
        context = self._context.extract({"traceparent": traceparent} if traceparent else {})
        kind = self._trace.SpanKind.SERVER
        span = self._tracer.start_span(name, context, kind, found, start_time=times[0])
        inside = self._trace.set_span_in_context(span, context)
        for child in children:
            self.child(child, inside)
        span.end(times[1])
        self.num_pending += 1
        return inside

    def child(self, child: tuple[str, int, float], parent: Any) -> None:
        """End a span inside another one: its name, its start and its seconds."""
        name, start, seconds = child
        span = self._tracer.start_span(name, parent, start_time=start)
        span.end(start + int(seconds * NANO))
        self.num_pending += 1

    def flush(self) -> None:
        """Send the ended spans to the collector in one request; waits for its response."""
        spans = self._pending.get_finished_spans()
        self._pending.clear()
        self.num_pending = 0
        if spans:
            self._collector.export(spans)

    def measure(self, timeline: Timeline, about: dict[str, str]) -> None:
        """Record a request in the metrics."""
        request, times = timeline.request, timeline.request.times
        if times.ended_at is None:
            return
        self._seconds["request.duration"].record(times.ended_at - times.arrived_at, about)
        for kind, count in (("input", request.prompt_len), ("output", request.produced)):
            self._tokens.record(count, about | {"gen_ai.token.type": kind})
        if times.first_token_at is None or times.last_token_at is None:
            return
        self._seconds["time_to_first_token"].record(times.first_token_at - times.arrived_at, about)
        if request.produced > 1:
            each = (times.last_token_at - times.first_token_at) / (request.produced - 1)
            self._seconds["time_per_output_token"].record(each, about)

    def close(self) -> None:
        """Export what is left."""
        self.flush()
        self._collector.shutdown()
        self._provider.shutdown()
        self._meters.shutdown()
