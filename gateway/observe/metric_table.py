"""The table of metrics. A new metric is one row here, beside the code that counts it.

Metrics that vLLM has, too, are repeated under vLLM's names, so that its dashboards and autoscalers
work. Names follow the rules of `promtool check metrics`, other than vLLM's.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from engine.policy import name_of
from engine.request import State
from engine.speculation.acceptance import DraftCounts
from gateway.observe.metrics import Histogram
from gateway.observe.readings import Readings, ServerReadings

R = TypeVar("R")
Value = float | Histogram
Reading = Value | Mapping[Any, Value] | None  # a mapping is by labels; None: not shown


class Kind(Enum):
    """The type of a metric, and its family in `prometheus_client`."""

    COUNTER = CounterMetricFamily
    GAUGE = GaugeMetricFamily
    HISTOGRAM = HistogramMetricFamily


class MetricRow(NamedTuple, Generic[R]):
    """One metric. `alias` is vLLM's name, "" if it has none.

    The label `model_name`, which vLLM's metrics have, is not part of a reading.
    """

    kind: Kind
    name: str
    help: str
    read: Callable[[R], Reading]
    alias: str = ""
    labels: tuple[str, ...] = ()
    is_per_key: bool = False  # the first label is the name of an API key, which sees its own rows


counter = partial(MetricRow["Readings"], Kind.COUNTER)
gauge = partial(MetricRow["Readings"], Kind.GAUGE)
histogram = partial(MetricRow["Readings"], Kind.HISTOGRAM)
server_counter = partial(MetricRow["ServerReadings"], Kind.COUNTER)
server_gauge = partial(MetricRow["ServerReadings"], Kind.GAUGE)
server_histogram = partial(MetricRow["ServerReadings"], Kind.HISTOGRAM)
MODEL_NAME = "model_name"
MODEL = (MODEL_NAME,)


def drafts(count: Callable[[DraftCounts], int]) -> Callable[[Readings], Reading]:
    """Reads a count of speculative decoding, if it is on."""

    def read(readings: Readings) -> Reading:
        counts = draft_counts(readings)
        return sum(map(count, counts)) if counts else None

    return read


def draft_counts(readings: Readings) -> list[DraftCounts]:
    """The counts of each replica; none without speculative decoding."""
    return [each.drafter.counts for each in readings.schedulers if each.drafter is not None]


def accepted_by_position(readings: Readings) -> Reading:
    """Accepted drafts by the number of drafts before them; None without speculative decoding."""
    counts = [counts.by_position for counts in draft_counts(readings)]
    if not counts:
        return None
    return {(at,): sum(each) for at, each in enumerate(zip_longest(*counts, fillvalue=0))}


# fmt: off
METRICS: tuple[MetricRow[Readings], ...] = (
    # Requests
    gauge("podway_requests_running", "Requests that hold KV slots.", lambda r: r.num_running,
        "vllm:num_requests_running"),
    gauge("podway_requests_waiting", "Requests that wait for KV slots.", lambda r: r.num_waiting,
        "vllm:num_requests_waiting"),
    gauge("podway_requests_swapped", "Requests whose KV cache is in the host tier, or moves there.",
        lambda r: r.count(State.SWAPPED, State.SWAPPING_OUT),
        "vllm:num_requests_swapped"),
    gauge("podway_waiting_tokens", "Tokens that waiting requests still have to compute.",
        lambda r: r.waiting_tokens),
    gauge("vllm:num_requests_waiting_by_reason",
        "Requests that wait for KV or batch capacity; none is deferred for another reason.",
        lambda r: {"capacity": r.num_waiting, "deferred": 0}, labels=(MODEL_NAME, "reason")),
    counter("podway_requests_total", "Requests that ended.", lambda r: r.metrics.requests.outcomes,
        labels=("outcome",)),
    counter("podway_aborts_total", "Requests that were aborted.",
        lambda r: r.metrics.requests.aborts, labels=("reason",)),
    counter("vllm:request_success", "Finished requests.", lambda r: r.metrics.requests.finishes,
        labels=(MODEL_NAME, "finished_reason")),
    counter("podway_preemptions_total", "Requests that were preempted.",
        lambda r: r.metrics.requests.preemptions, labels=("kind",)),
    counter("vllm:num_preemptions", "Requests that were preempted.",
        lambda r: r.metrics.requests.preemptions.total(), labels=MODEL),
    histogram("podway_time_to_first_token_seconds", "From arrival to the first token (TTFT).",
        lambda r: r.metrics.time_to_first_token, "vllm:time_to_first_token_seconds"),
    histogram("podway_inter_token_seconds", "Between two tokens of a request (ITL).",
        lambda r: r.metrics.inter_token, "vllm:inter_token_latency_seconds"),
    histogram("podway_request_seconds", "From arrival to the last token (JCT).",
        lambda r: r.metrics.requests.request_seconds, "vllm:e2e_request_latency_seconds"),
    histogram("podway_queue_seconds", "From arrival to the first KV slot.",
        lambda r: r.metrics.requests.queue_seconds, "vllm:request_queue_time_seconds"),
    histogram("podway_prefill_seconds", "From the first KV slot to the first token.",
        lambda r: r.metrics.requests.prefill_seconds, "vllm:request_prefill_time_seconds"),
    histogram("podway_decode_seconds", "From the first token to the last one.",
        lambda r: r.metrics.requests.decode_seconds, "vllm:request_decode_time_seconds"),
    histogram("podway_cancel_to_free_iterations",
        "Iterations from a cancel until its KV slots are free.",
        lambda r: r.metrics.requests.cancel_to_free),

    # Tokens
    counter("podway_prompt_tokens_total", "Prompt tokens.", lambda r: r.metrics.num_prompt_tokens,
        "vllm:prompt_tokens"),
    counter("podway_output_tokens_total", "Tokens sampled.", lambda r: r.metrics.num_output_tokens,
        "vllm:generation_tokens"),
    counter("podway_prefix_tokens_total",
        "Prompt tokens found in the prefix cache (hit) or computed (miss).",
        lambda r: r.prefix_tokens, labels=("result",)),
    counter("vllm:prefix_cache_hits", "Prefix cache hits, tokens.",
        lambda r: r.metrics.num_cached_tokens, labels=MODEL),
    counter("vllm:prefix_cache_queries", "Prefix cache queries, tokens.",
        lambda r: r.metrics.num_prompt_tokens, labels=MODEL),
    counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.",
        lambda r: r.metrics.num_cached_tokens, labels=MODEL),
    histogram("podway_request_prompt_tokens", "Prompt tokens of a finished request.",
        lambda r: r.metrics.requests.prompt_tokens, "vllm:request_prompt_tokens"),
    histogram("podway_request_generation_tokens", "Output tokens of a finished request.",
        lambda r: r.metrics.requests.generation_tokens, "vllm:request_generation_tokens"),
    histogram("vllm:request_max_num_generation_tokens",
        "Output tokens of the longest choice of a request.",
        lambda r: r.metrics.requests.max_generation_tokens, labels=MODEL),
    counter("vllm:spec_decode_num_drafts", "Decodes with drafts.",
        drafts(lambda counts: counts.num_entries), labels=MODEL),
    counter("vllm:spec_decode_num_draft_tokens", "Draft tokens computed.",
        drafts(lambda counts: counts.num_drafts), labels=MODEL),
    counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.",
        drafts(lambda counts: counts.num_accepted), labels=MODEL),
    counter("vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position among the drafts.",
        accepted_by_position, labels=(MODEL_NAME, "position")),
    counter("podway_lora_tokens_total",
        "Tokens of ended requests by LoRA adapter; without a name, of the base model.",
        lambda r: r.lora_usage.tokens, labels=("lora", "kind")),
    gauge("vllm:lora_requests_info", "LoRA adapters of running and of waiting requests.",
        lambda r: r.lora_requests(),
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters")),

    # Iterations
    counter("podway_iterations_total", "Iterations committed.", lambda r: r.metrics.num_iterations),
    histogram("podway_iteration_seconds", "Duration of an iteration in the worker.",
        lambda r: r.metrics.iteration_seconds),
    histogram("podway_iteration_requests", "Requests in an iteration.",
        lambda r: r.metrics.iteration_requests),
    histogram("podway_iteration_tokens", "Tokens computed in an iteration.",
        lambda r: r.metrics.iteration_tokens, "vllm:iteration_tokens_total"),
    gauge("podway_policy_info", "Scheduling policy and admission.",
        lambda r: {(name_of(r.scheduler.policy), r.scheduler.settings.admission.value): 1},
        labels=("policy", "admission")),
    gauge("podway_itl_goal_seconds", "The ITL goal; 0 if there is none.",
        lambda r: r.itl_goal or 0.0),
    counter("podway_itl_goal_steps_total", "Iterations with a decode that has an ITL goal.",
        lambda r: r.metrics.goal_steps, labels=("result",)),
    gauge("podway_cost_model_error",
        "Relative error of predicted iteration times, of the recent iterations.",
        lambda r: {"50": e.median, "90": e.p90} if (e := r.cost_error) else {"50": 0, "90": 0},
        labels=("percentile",)),
    counter("podway_worker_restarts_total", "Workers that died and were replaced.",
        lambda r: r.metrics.num_workers_lost),
    counter("podway_encoded_images_total", "Images that the model's encoder has read.",
        lambda r: sum(each.images.num_encoded for each in r.schedulers)),
    gauge("podway_encoder_cache_bytes", "Size of the encoded images that are kept.",
        lambda r: sum(each.images.num_bytes for each in r.schedulers)),

    # KV memory
    gauge("podway_kv_slots", "KV slots by tier and state.",
        lambda r: {place: n * r.block_size for place, n in r.kv_blocks.items()},
        labels=("tier", "state")),
    gauge("podway_orphan_blocks", "KV blocks owned by no live request; always 0.",
        lambda r: r.kv_counts.num_orphans),
    counter("podway_swapped_blocks_total", "KV blocks moved between device and host.",
        lambda r: r.metrics.requests.swapped_blocks, labels=("direction",)),
    counter("podway_kv_store_lookups_total",
        "Prompts that were looked up in the store of --kv-store.", lambda r: r.metrics.kv_lookups,
        labels=("outcome",)),
    gauge("vllm:cache_config_info", "Block size and number of KV blocks.",
        lambda r: {(r.block_size, r.num_blocks): 1},
        labels=(MODEL_NAME, "block_size", "num_gpu_blocks")),
    *(gauge(name, "Share of KV blocks in use, 0 to 1.",
        lambda r: r.num_used_blocks / r.num_blocks, labels=MODEL)
      for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
    counter("podway_kv_event_batches_dropped_total",
        "Batches of KV events not published: full queue.",
        lambda r: r.metrics.num_dropped_kv_events),
)

SERVER_METRICS: tuple[MetricRow[ServerReadings], ...] = (
    server_counter("podway_http_requests_total",
        "HTTP requests that ended or were rejected, and batch lines.",
        lambda r: r.request_log.requests, labels=("path", "method", "status")),
    server_counter("http_requests_total",
        "HTTP requests by class of status, under the name that vLLM's dashboards use.",
        lambda r: r.http_requests_by_class(), labels=("handler", "method", "status")),
    server_counter("podway_key_requests_total", "The same by API key.",
        lambda r: r.request_log.key_requests, labels=("key", "status"), is_per_key=True),
    server_counter("podway_key_tokens_total", "Tokens of ended requests by API key.",
        lambda r: r.request_log.key_tokens, labels=("key", "kind"), is_per_key=True),
    server_histogram("podway_loop_lag_seconds", "Delay of the event loop's timers.",
        lambda r: r.metrics.loop_lag),
    server_counter("podway_traces_dropped_total", "Requests not traced: slow collector.",
        lambda r: r.metrics.num_dropped_traces),
    server_gauge("podway_store_writable", "1 if the store can be written, 0 if it is full.",
        lambda r: r.database.is_writable),
)
# fmt: on
