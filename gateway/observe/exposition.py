"""`/metrics`: the counts of `Metrics` and the scheduler's state, in Prometheus' text format.

Gauges are read on each scrape. Metrics that vLLM has, too, are repeated under vLLM's names, so
that its dashboards and autoscalers work.
"""

from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.policy import name_of
from engine.request import State
from engine.step import Tier
from gateway.observe.families import Described, histograms_of, labelled, table

if TYPE_CHECKING:
    from engine.control.scheduler import IterationScheduler
    from gateway.observe.loras import LoraUsage
    from gateway.observe.metrics import Metrics
    from gateway.observe.request_log import RequestLog
    from gateway.store.database import Database

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Exposition(Collector):
    """Reads the metrics and the scheduler; `model` is the label `model_name` of vLLM's metrics."""

    def __init__(
        self,
        metrics: "Metrics",
        scheduler: "IterationScheduler",
        model: str,
        database: "Database",
        request_log: "RequestLog",
        lora_usage: "LoraUsage",
    ) -> None:
        self._metrics = metrics
        self._scheduler = scheduler
        self._model = model
        self._database = database
        self._request_log = request_log
        self._lora_usage = lora_usage
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The page of `/metrics`, of media type `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        """Prompt tokens found in the prefix cache, and all prompt tokens."""
        return self._metrics.num_cached_tokens, self._metrics.num_prompt_tokens

    def describe(self) -> list[Metric]:
        """None: the registry has no other collector to conflict with."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        yield from self._queue()
        yield from self._memory()
        yield from self._outcomes()
        yield from self._counters()
        yield from self._prefixes()
        yield from self._speculation()
        yield from self._histograms()
        yield from self._vllm_only()
        yield from self._http()
        yield from self._lora_usage.metrics(self._scheduler.pool)
        yield self._policy()
        yield from self._steps()
        yield from self._gauge(
            Described("podway_store_writable", "1 if the store can be written, 0 if it is full."),
            self._database.is_writable,
        )

    def _http(self) -> Iterator[Metric]:
        log = self._request_log
        yield table(
            "podway_http_requests_total",
            "HTTP requests that ended or were rejected, and batch lines.",
            ("path", "method", "status"),
            log.requests,
        )
        yield table(
            "podway_key_requests_total",
            "The same by API key.",
            ("key", "status"),
            log.key_requests,
        )
        yield table(
            "podway_key_tokens_total",
            "Tokens of ended requests by API key.",
            ("key", "kind"),
            log.key_tokens,
        )

    def _vllm_only(self) -> Iterator[Metric]:
        """Metrics of vLLM's dashboards whose content has another form among ours."""
        metrics, waiting = self._metrics, self._scheduler.pool.count(State.WAITING)
        yield self._aliased(
            CounterMetricFamily,
            "vllm:prompt_tokens_cached",
            "Prompt tokens found in the prefix cache.",
            metrics.num_cached_tokens,
        )
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait for KV or batch capacity; none is deferred for another reason.",
            labels=["model_name", "reason"],
        )
        for reason, count in (("capacity", waiting), ("deferred", 0)):
            by_reason.add_metric([self._model, reason], count)
        yield by_reason
        longest = HistogramMetricFamily(
            "vllm:request_max_num_generation_tokens",
            "Output tokens of the longest choice of a request.",
            labels=["model_name"],
        )
        observed = metrics.max_generation_tokens
        longest.add_metric([self._model], observed.buckets(), observed.sum)
        yield longest
        statuses: Counter[tuple[str, str, str]] = Counter()
        for (path, method, status), count in self._request_log.requests.items():
            statuses[path, method, f"{status // 100}xx"] += count
        yield table(
            "http_requests_total",
            "HTTP requests by class of status, under the name that vLLM's dashboards use.",
            ("handler", "method", "status"),
            statuses,
        )

    def _steps(self) -> Iterator[Metric]:
        """The ITL goal and the cost model by which steps are planned."""
        scheduler = self._scheduler
        goal = scheduler.settings.itl_goal
        yield from self._gauge(
            Described("podway_itl_goal_seconds", "The ITL goal; 0 if there is none."),
            0.0 if goal == inf else goal,
        )
        yield labelled(
            "podway_itl_goal_steps_total",
            "Iterations with a decode that has an ITL goal.",
            "result",
            self._metrics.goal_steps,
        )
        error = GaugeMetricFamily(
            "podway_cost_model_error",
            "Relative error of predicted iteration times, of the recent iterations.",
            labels=["quantile"],
        )
        summary = scheduler.cost.errors.summary()
        error.add_metric(["0.5"], 0.0 if summary is None else summary.median)
        error.add_metric(["0.9"], 0.0 if summary is None else summary.p90)
        yield error

    def _policy(self) -> Metric:
        scheduler = self._scheduler
        info = GaugeMetricFamily(
            "podway_policy_info", "Scheduling policy and admission.", labels=["policy", "admission"]
        )
        info.add_metric([name_of(scheduler.policy), scheduler.settings.admission.value], 1)
        return info

    def _queue(self) -> Iterator[Metric]:
        pool = self._scheduler.pool
        waiting = pool.count(State.WAITING)
        yield from self._gauge(
            Described(
                "podway_requests_running",
                "Requests that hold KV slots.",
                "vllm:num_requests_running",
            ),
            pool.num_admitted,
        )
        yield from self._gauge(
            Described(
                "podway_requests_waiting",
                "Requests that wait for KV slots.",
                "vllm:num_requests_waiting",
            ),
            waiting,
        )
        yield from self._gauge(
            Described(
                "podway_requests_swapped",
                "Requests whose KV cache is in the host tier, or moves there.",
                "vllm:num_requests_swapped",
            ),
            sum(pool.count(state) for state in (State.SWAPPED, State.SWAPPING_OUT)),
        )
        yield from self._gauge(
            Described(
                "podway_waiting_tokens", "Tokens that waiting requests still have to compute."
            ),
            pool.waiting_tokens,
        )

    def _memory(self) -> Iterator[Metric]:
        ledger = self._scheduler.ledger
        slots = GaugeMetricFamily(
            "podway_kv_slots", "KV slots by tier and state.", labels=["tier", "state"]
        )
        for tier, state, num_blocks in (
            ("device", "free", ledger.num_free - ledger.num_cached),
            ("device", "held", ledger.num_held),
            ("device", "cached", ledger.num_cached),
            ("device", "moving", ledger.num_moving),
            ("host", "free", ledger.host.num_free - ledger.host.cached.num_replaceable),
            ("host", "held", ledger.host.num_held),
            ("host", "cached", len(ledger.host.cached)),
            ("host", "moving", ledger.host.num_moving),
            ("disk", "cached", len(ledger.disk)),
            ("store", "cached", len(ledger.lower.get(Tier.STORE, ()))),
        ):
            slots.add_metric([tier, state], num_blocks * ledger.block_size)
        yield slots
        yield from self._gauge(
            Described("podway_orphan_blocks", "KV blocks owned by no live request; always 0."),
            ledger.num_leaked(self._scheduler.pool),
        )
        yield self._cache_config()
        used = (ledger.num_held + ledger.num_moving) / ledger.num_blocks
        for alias in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._aliased(
                GaugeMetricFamily, alias, "Share of KV blocks in use, 0 to 1.", used
            )

    def _cache_config(self) -> Metric:
        """vLLM's, from which routers learn the block size and the number of blocks."""
        ledger = self._scheduler.ledger
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Block size and number of KV blocks.",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        info.add_metric([self._model, str(ledger.block_size), str(ledger.num_blocks)], 1)
        return info

    def _outcomes(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield labelled("podway_requests_total", "Requests that ended.", "outcome", metrics.outcomes)
        yield labelled(
            "podway_aborts_total",
            "Requests that were aborted.",
            "reason",
            {reason.value: count for reason, count in metrics.aborts.items()},
        )
        yield labelled(
            "podway_preemptions_total",
            "Requests that were preempted.",
            "kind",
            metrics.preemptions,
        )
        yield labelled(
            "podway_kv_store_lookups_total",
            "Prompts that were looked up in the store of --kv-store.",
            "outcome",
            metrics.kv_lookups,
        )
        yield labelled(
            "podway_swapped_blocks_total",
            "KV blocks moved between device and host.",
            "direction",
            {direction.value: count for direction, count in metrics.swapped_blocks.items()},
        )
        success = CounterMetricFamily(
            "vllm:request_success", "Finished requests.", labels=["model_name", "finished_reason"]
        )
        for reason, count in metrics.finishes.items():
            success.add_metric([self._model, reason], count)
        yield success

    def _counters(self) -> Iterator[Metric]:
        metrics = self._metrics
        for described, count in (
            (Described("podway_iterations_total", "Iterations committed."), metrics.num_iterations),
            (
                Described("podway_traces_dropped_total", "Requests not traced: slow collector."),
                metrics.num_dropped_traces,
            ),
            (
                Described(
                    "podway_kv_event_batches_dropped_total",
                    "Batches of KV events not published: full queue.",
                ),
                metrics.num_dropped_kv_events,
            ),
            (
                Described("podway_worker_restarts_total", "Workers that died and were replaced."),
                metrics.num_workers_lost,
            ),
            (
                Described("podway_prompt_tokens_total", "Prompt tokens.", "vllm:prompt_tokens"),
                metrics.num_prompt_tokens,
            ),
            (
                Described(
                    "podway_output_tokens_total", "Tokens sampled.", "vllm:generation_tokens"
                ),
                metrics.num_output_tokens,
            ),
        ):
            yield CounterMetricFamily(described.name, described.help, value=count)
            if described.alias:
                yield self._aliased(CounterMetricFamily, described.alias, described.help, count)
        yield self._aliased(
            CounterMetricFamily,
            "vllm:num_preemptions",
            "Requests that were preempted.",
            metrics.preemptions.total(),
        )

    def _prefixes(self) -> Iterator[Metric]:
        """Prompt tokens, counted at their request's first token."""
        hits, queries = self.prefix_tokens
        text = "Prompt tokens found in the prefix cache (hit) or computed (miss)."
        counts = {"hit": hits, "miss": queries - hits}
        yield labelled("podway_prefix_tokens_total", text, "result", counts)
        for alias, count in (("hits", hits), ("queries", queries)):
            name = f"vllm:prefix_cache_{alias}"
            yield self._aliased(CounterMetricFamily, name, f"Prefix cache {alias}, tokens.", count)

    def _speculation(self) -> Iterator[Metric]:
        """vLLM's counters of speculative decoding, if it is on."""
        if self._scheduler.drafter is None:
            return
        counts = self._scheduler.drafter.counts
        for name, text, count in (
            ("drafts", "Decodes with drafts.", counts.num_entries),
            ("draft_tokens", "Draft tokens computed.", counts.num_drafts),
            ("accepted_tokens", "Draft tokens accepted.", counts.num_accepted),
        ):
            yield self._aliased(CounterMetricFamily, f"vllm:spec_decode_num_{name}", text, count)
        by_position = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position among the drafts.",
            labels=["model_name", "position"],
        )
        for position, count in enumerate(counts.by_position):
            by_position.add_metric([self._model, str(position)], count)
        yield by_position

    def _histograms(self) -> Iterator[Metric]:
        for described, observed in histograms_of(self._metrics):
            histogram = HistogramMetricFamily(described.name, described.help)
            histogram.add_metric([], observed.buckets(), observed.sum)
            yield histogram
            if described.alias:
                alias = HistogramMetricFamily(
                    described.alias, described.help, labels=["model_name"]
                )
                alias.add_metric([self._model], observed.buckets(), observed.sum)
                yield alias

    def _gauge(self, described: Described, value: float) -> Iterator[Metric]:
        yield GaugeMetricFamily(described.name, described.help, value=value)
        if described.alias:
            yield self._aliased(GaugeMetricFamily, described.alias, described.help, value)

    def _aliased(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        metric = family(name, text, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric
