"""`/metrics`: the table of metrics in Prometheus' text format."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from gateway.observe.metric_table import METRICS, MODEL, MODEL_NAME, MetricRow, Value
from gateway.observe.metrics import Histogram
from gateway.observe.ticked import Ticked

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from engine.ports import Clock
    from gateway.observe.readings import Readings

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Exposition:
    """Renders the metrics, at most once per tick for all readers.

    `model` is the label `model_name` of vLLM's metrics.
    """

    def __init__(self, readings: "Readings", model: str, clock: "Clock") -> None:
        self._shared = CollectorRegistry()
        self._shared.register(_Families(readings, model, is_per_key=False))
        ProcessCollector(registry=self._shared)
        self._of_keys = _Families(readings, model, is_per_key=True)
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
class _Families(Collector):
    """Reads the rows of the table that are per API key, of one key or of all; or the other rows."""

    readings: "Readings"
    model: str
    is_per_key: bool
    key: str | None = None

    def describe(self) -> list["Metric"]:
        """None: the registry has no other collector to conflict with."""
        return []

    def collect(self) -> Iterator["Metric"]:
        for row in METRICS:
            reading = row.read(self.readings) if row.is_per_key is self.is_per_key else None
            if reading is None:
                continue
            samples = reading if isinstance(reading, Mapping) else {(): reading}
            yield self._family(row, row.name, row.labels, samples)
            if row.alias:
                yield self._family(row, row.alias, MODEL, samples)

    def _family(
        self, row: MetricRow, name: str, labels: tuple[str, ...], samples: Mapping[Any, Value]
    ) -> Any:
        """A `Metric` of the row's family."""
        family = row.kind.value(name, row.help, labels=labels)
        model = [self.model] if MODEL_NAME in labels else []
        for key, value in samples.items():
            values = [_text(label) for label in (key if isinstance(key, tuple) else (key,))]
            if self.key is not None and values[0] != self.key:
                continue
            if isinstance(value, Histogram):
                family.add_metric(model + values, value.buckets(), value.sum)
            else:
                family.add_metric(model + values, value)
        return family


def _text(label: str | int | Enum) -> str:
    return str(label.value if isinstance(label, Enum) else label)
