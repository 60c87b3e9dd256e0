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
from typing import TYPE_CHECKING, Any

from engine.errors import StartupError

if TYPE_CHECKING:
    from engine.ports import Clock
    from gateway.observe.metrics import Metrics
    from gateway.observe.timelines import Timeline

logger = logging.getLogger(__name__)

MAX_QUEUE = 2048  # ended requests that wait for export
MAX_PARENTS = 4096  # requests whose `traceparent` is remembered
EXPORT_SECONDS = 5.0  # of one attempt
METRICS_SECONDS = 15.0  # between two exports of metrics
NANO = 1_000_000_000
INSTALL = "pip install 'podway[otel]'"


class Traces:
    """Exports ended requests to an OTLP collector over HTTP. Close it to export what is left."""

    def __init__(self, endpoint: str, model: str, clock: "Clock", metrics: "Metrics") -> None:
        """Raises `StartupError` if the OpenTelemetry packages are not installed."""
        self._metrics = metrics
        self._model = model
        self._offset = time.time_ns() - int(clock() * NANO)
        self._parents: OrderedDict[str, str] = OrderedDict()
        self._queue: queue.Queue[Timeline | None] = queue.Queue(MAX_QUEUE)
        self._exporter = _Exporter(endpoint)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, request_id: str, traceparent: str) -> None:
        """Continue the caller's trace (W3C `traceparent`) in this request's span."""
        self._parents[request_id] = traceparent
        if len(self._parents) > MAX_PARENTS:
            self._parents.popitem(last=False)

    def ended(self, timeline: "Timeline") -> None:
        """Queue an ended request; dropped and counted if the queue is full."""
        try:
            self._queue.put_nowait(timeline)
        except queue.Full:
            self._metrics.num_dropped_traces += 1

    def close(self) -> None:
        """Export what is queued, for at most `EXPORT_SECONDS`."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=EXPORT_SECONDS)
        self._thread.join(EXPORT_SECONDS)

    def _run(self) -> None:
        while (timeline := self._queue.get()) is not None:
            label = timeline.request.spec.label
            try:
                self._export(timeline, self._parents.pop(label, ""))
            except Exception:  # a trace must never end the thread
                logger.exception("request %s could not be traced", label)
        self._exporter.close()

    def _export(self, timeline: "Timeline", traceparent: str) -> None:
        request, at = timeline.request, self._unix_nanoseconds
        ended = request.arrived_at if request.ended_at is None else request.ended_at
        found = attributes(timeline, self._model)
        children = [
            (span.phase, at(request.arrived_at + span.start), span.seconds)
            for span in timeline.spans(ended)
            if span.seconds > 0
        ]
        name = f"text_completion {self._model}"
        self._exporter.span(name, (at(request.arrived_at), at(ended)), found, children, traceparent)
        self._exporter.measure(timeline, {"gen_ai.request.model": self._model})

    def _unix_nanoseconds(self, seconds: float) -> int:
        return self._offset + int(seconds * NANO)


def attributes(timeline: "Timeline", model: str) -> dict[str, Any]:
    """The attributes of a request's span. Latencies are in seconds."""
    request = timeline.request
    spec = request.spec
    phases: dict[str, float] = {}
    for span in timeline.spans(request.ended_at or request.arrived_at):
        phases[span.phase] = phases.get(span.phase, 0.0) + span.seconds
    found: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
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
        "podway.preemptions": request.num_preemptions,
        "podway.swaps": request.num_swaps,
    }
    if request.first_token_at is not None:
        ttft = request.first_token_at - request.arrived_at
        found["gen_ai.latency.time_to_first_token"] = ttft
    if request.ended_at is not None:
        found["gen_ai.latency.e2e"] = request.ended_at - request.arrived_at
    return found


class _Exporter:
    """The OpenTelemetry SDK: a tracer whose spans are exported by the calling thread, and
    meters."""

    def __init__(self, endpoint: str) -> None:
        try:
            sdk = {
                name: importlib.import_module(f"opentelemetry.{name}")
                for name in (
                    "trace",
                    "sdk.trace",
                    "sdk.trace.export",
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
        spans = sdk["exporter.otlp.proto.http.trace_exporter"].OTLPSpanExporter(
            endpoint=f"{base}/v1/traces", timeout=EXPORT_SECONDS
        )
        metrics = sdk["exporter.otlp.proto.http.metric_exporter"].OTLPMetricExporter(
            endpoint=f"{base}/v1/metrics", timeout=EXPORT_SECONDS
        )
        self._provider = sdk["sdk.trace"].TracerProvider(resource=resource)
        self._provider.add_span_processor(sdk["sdk.trace.export"].SimpleSpanProcessor(spans))
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
    ) -> None:
        """Export a server span and its children. Times are Unix nanoseconds."""
        context = self._context.extract({"traceparent": traceparent} if traceparent else {})
        kind = self._trace.SpanKind.SERVER
        span = self._tracer.start_span(name, context, kind, found, start_time=times[0])
        inside = self._trace.set_span_in_context(span, context)
        for phase, start, seconds in children:
            child = self._tracer.start_span(phase, inside, start_time=start)
            child.end(start + int(seconds * NANO))
        span.end(times[1])

    def measure(self, timeline: "Timeline", about: dict[str, str]) -> None:
        """Record a request in the metrics."""
        request = timeline.request
        if request.ended_at is None:
            return
        self._seconds["request.duration"].record(request.ended_at - request.arrived_at, about)
        for kind, count in (("input", request.prompt_len), ("output", request.produced)):
            self._tokens.record(count, about | {"gen_ai.token.type": kind})
        if request.first_token_at is None or request.last_token_at is None:
            return
        ttft = request.first_token_at - request.arrived_at
        self._seconds["time_to_first_token"].record(ttft, about)
        if request.produced > 1:
            each = (request.last_token_at - request.first_token_at) / (request.produced - 1)
            self._seconds["time_per_output_token"].record(each, about)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()
        self._meters.shutdown()
