"""`/metrics`: the table of metrics in Prometheus' text format."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.ports import Clock
from gateway.observe.metric_table import (
    METRICS,
    MODEL,
    MODEL_NAME,
    SERVER_METRICS,
    MetricRow,
    Reading,
)
from gateway.observe.metrics import Histogram
from gateway.observe.readings import Readings, ServerReadings, Ticked

CONTENT_TYPE = CONTENT_TYPE_LATEST
Models = Callable[[], Mapping[str, "Readings"]]


class Exposition:
    """Renders the metrics, at most once per tick for all readers.

    The metrics of a model are those of `models()`, by name. The name is the label `model_name` of
    vLLM's metrics and, if the server `has_several`, of all metrics of a model.
    """

    def __init__(
        self, server: ServerReadings, models: Models, clock: Clock, *, has_several: bool = False
    ) -> None:
        self._shared = CollectorRegistry()
        self._shared.register(_Models(models, has_several))
        self._shared.register(_Server(server, is_per_key=False))
        ProcessCollector(registry=self._shared)
        self._of_keys = _Server(server, is_per_key=True)
        self._pages = Ticked(lambda: _Page(generate_latest(self._shared)), clock)

    async def render(self, key: str | None = None) -> bytes:
        """The page of `/metrics`, of media type `CONTENT_TYPE`, for the API key of this name, or
        with the requests of every key."""
        page = await self._pages.get()
        if key not in page.by_key:
            registry = CollectorRegistry()
            registry.register(replace(self._of_keys, key=key))
            page.by_key[key] = generate_latest(registry)
        return page.shared + page.by_key[key]


@dataclass(frozen=True, slots=True)
class _Page:
    """A rendered page: what all readers see, and what is added for the API keys that asked."""

    shared: bytes
    by_key: dict[str | None, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Models(Collector):
    """Reads the metrics of all loaded models."""

    models: Models
    has_several: bool

    def describe(self) -> list[Metric]:
        """None: the registry has no other collector to conflict with."""
        return []

    def collect(self) -> Iterator[Metric]:
        models = self.models()
        for row in METRICS:
            readings = {name: row.read(each) for name, each in models.items()}
            shown = {name: each for name, each in readings.items() if each is not None}
            if not shown:
                continue
            is_labelled = self.has_several and MODEL_NAME not in row.labels
            yield _family(row, row.name, MODEL * is_labelled + row.labels, shown)
            if row.alias:
                yield _family(row, row.alias, MODEL, shown)


@dataclass(frozen=True, slots=True, eq=False)
class _Server(Collector):
    """Reads the metrics of the server that are per API key, of one key or of all; or the others."""

    readings: ServerReadings
    is_per_key: bool
    key: str | None = None

    def describe(self) -> list[Metric]:
        """None: the registry has no other collector to conflict with."""
        return []

    def collect(self) -> Iterator[Metric]:
        for row in SERVER_METRICS:
            if row.is_per_key is self.is_per_key:
                yield _family(row, row.name, row.labels, {"": row.read(self.readings)}, self.key)


def _family(
    row: MetricRow[Any],
    name: str,
    labels: tuple[str, ...],
    readings: Mapping[str, Reading],
    key: str | None = None,
) -> Any:
    """A `Metric` of the row's family, with the readings of several models by name; with a `key`,
    only the samples of that API key."""
    family = row.kind.value(name, row.help, labels=labels)
    for model, reading in readings.items():
        samples = reading if isinstance(reading, Mapping) else {(): reading}
        for sample, value in samples.items():
            texts = [_text(label) for label in (sample if isinstance(sample, tuple) else (sample,))]
            if key is not None and texts[0] != key:
                continue
            values = [model] * (MODEL_NAME in labels) + texts
            if isinstance(value, Histogram):
                family.add_metric(values, value.buckets(), value.sum)
            else:
                family.add_metric(values, value)
    return family


def _text(label: str | int | Enum) -> str:
    return str(label.value if isinstance(label, Enum) else label)
