"""The table of metrics. A new metric is one row here, beside the code that counts it.

Metrics that vLLM has, too, are repeated under vLLM's names, so that its dashboards and autoscalers
work. Names follow the rules of `promtool check metrics`, other than vLLM's.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from engine.policy import name_of
from engine.request import State
from gateway.observe.metrics import Histogram

if TYPE_CHECKING:
    from engine.speculation.acceptance import DraftCounts
    from gateway.observe.readings import Readings

Value = float | Histogram
Reading = Value | Mapping[Any, Value] | None  # a mapping is by labels; None: not shown


class Kind(Enum):
    """The type of a metric, and its family in `prometheus_client`."""

    COUNTER = CounterMetricFamily
    GAUGE = GaugeMetricFamily
    HISTOGRAM = HistogramMetricFamily


class MetricRow(NamedTuple):
    """One metric. `alias` is vLLM's name, "" if it has none.

    The label `model_name`, which vLLM's metrics have, is not part of a reading.
    """

    name: str
    kind: Kind
    help: str
    read: Callable[["Readings"], Reading]
    alias: str = ""
    labels: tuple[str, ...] = ()
    is_per_key: bool = False  # the first label is the name of an API key, which sees its own rows


COUNTER, GAUGE, HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
MODEL_NAME = "model_name"
MODEL = (MODEL_NAME,)


def drafts(counts: Callable[["DraftCounts"], Reading]) -> Callable[["Readings"], Reading]:
    """Reads counts of speculative decoding, if it is on."""
    return lambda r: None if r.scheduler.drafter is None else counts(r.scheduler.drafter.counts)


# fmt: off
METRICS: tuple[MetricRow, ...] = (
    # Requests
    MetricRow("podway_requests_running", GAUGE, "Requests that hold KV slots.",
              lambda r: r.pool.num_admitted, "vllm:num_requests_running"),
    MetricRow("podway_requests_waiting", GAUGE, "Requests that wait for KV slots.",
              lambda r: r.num_waiting, "vllm:num_requests_waiting"),
    MetricRow("podway_requests_swapped", GAUGE,
              "Requests whose KV cache is in the host tier, or moves there.",
              lambda r: r.pool.count(State.SWAPPED) + r.pool.count(State.SWAPPING_OUT),
              "vllm:num_requests_swapped"),
    MetricRow("podway_waiting_tokens", GAUGE,
              "Tokens that waiting requests still have to compute.",
              lambda r: r.pool.waiting_tokens),
    MetricRow("vllm:num_requests_waiting_by_reason", GAUGE,
              "Requests that wait for KV or batch capacity; none is deferred for another reason.",
              lambda r: {"capacity": r.num_waiting, "deferred": 0},
              labels=(MODEL_NAME, "reason")),
    MetricRow("podway_requests_total", COUNTER, "Requests that ended.",
              lambda r: r.metrics.requests.outcomes, labels=("outcome",)),
    MetricRow("podway_aborts_total", COUNTER, "Requests that were aborted.",
              lambda r: r.metrics.requests.aborts, labels=("reason",)),
    MetricRow("vllm:request_success", COUNTER, "Finished requests.",
              lambda r: r.metrics.requests.finishes, labels=(MODEL_NAME, "finished_reason")),
    MetricRow("podway_preemptions_total", COUNTER, "Requests that were preempted.",
              lambda r: r.metrics.requests.preemptions, labels=("kind",)),
    MetricRow("vllm:num_preemptions", COUNTER, "Requests that were preempted.",
              lambda r: r.metrics.requests.preemptions.total(), labels=MODEL),
    MetricRow("podway_time_to_first_token_seconds", HISTOGRAM,
              "From arrival to the first token (TTFT).",
              lambda r: r.metrics.time_to_first_token, "vllm:time_to_first_token_seconds"),
    MetricRow("podway_inter_token_seconds", HISTOGRAM, "Between two tokens of a request (ITL).",
              lambda r: r.metrics.inter_token, "vllm:inter_token_latency_seconds"),
    MetricRow("podway_request_seconds", HISTOGRAM, "From arrival to the last token (JCT).",
              lambda r: r.metrics.requests.request_seconds, "vllm:e2e_request_latency_seconds"),
    MetricRow("podway_queue_seconds", HISTOGRAM, "From arrival to the first KV slot.",
              lambda r: r.metrics.requests.queue_seconds, "vllm:request_queue_time_seconds"),
    MetricRow("podway_prefill_seconds", HISTOGRAM, "From the first KV slot to the first token.",
              lambda r: r.metrics.requests.prefill_seconds, "vllm:request_prefill_time_seconds"),
    MetricRow("podway_decode_seconds", HISTOGRAM, "From the first token to the last one.",
              lambda r: r.metrics.requests.decode_seconds, "vllm:request_decode_time_seconds"),
    MetricRow("podway_cancel_to_free_iterations", HISTOGRAM,
              "Iterations from a cancel until its KV slots are free.",
              lambda r: r.metrics.requests.cancel_to_free),

    # Tokens
    MetricRow("podway_prompt_tokens_total", COUNTER, "Prompt tokens.",
              lambda r: r.metrics.num_prompt_tokens, "vllm:prompt_tokens"),
    MetricRow("podway_output_tokens_total", COUNTER, "Tokens sampled.",
              lambda r: r.metrics.num_output_tokens, "vllm:generation_tokens"),
    MetricRow("podway_prefix_tokens_total", COUNTER,
              "Prompt tokens found in the prefix cache (hit) or computed (miss).",
              lambda r: r.prefix_tokens, labels=("result",)),
    MetricRow("vllm:prefix_cache_hits", COUNTER, "Prefix cache hits, tokens.",
              lambda r: r.metrics.num_cached_tokens, labels=MODEL),
    MetricRow("vllm:prefix_cache_queries", COUNTER, "Prefix cache queries, tokens.",
              lambda r: r.metrics.num_prompt_tokens, labels=MODEL),
    MetricRow("vllm:prompt_tokens_cached", COUNTER, "Prompt tokens found in the prefix cache.",
              lambda r: r.metrics.num_cached_tokens, labels=MODEL),
    MetricRow("podway_request_prompt_tokens", HISTOGRAM, "Prompt tokens of a finished request.",
              lambda r: r.metrics.requests.prompt_tokens, "vllm:request_prompt_tokens"),
    MetricRow("podway_request_generation_tokens", HISTOGRAM,
              "Output tokens of a finished request.",
              lambda r: r.metrics.requests.generation_tokens, "vllm:request_generation_tokens"),
    MetricRow("vllm:request_max_num_generation_tokens", HISTOGRAM,
              "Output tokens of the longest choice of a request.",
              lambda r: r.metrics.requests.max_generation_tokens, labels=MODEL),
    MetricRow("vllm:spec_decode_num_drafts", COUNTER, "Decodes with drafts.",
              drafts(lambda counts: counts.num_entries), labels=MODEL),
    MetricRow("vllm:spec_decode_num_draft_tokens", COUNTER, "Draft tokens computed.",
              drafts(lambda counts: counts.num_drafts), labels=MODEL),
    MetricRow("vllm:spec_decode_num_accepted_tokens", COUNTER, "Draft tokens accepted.",
              drafts(lambda counts: counts.num_accepted), labels=MODEL),
    MetricRow("vllm:spec_decode_num_accepted_tokens_per_pos", COUNTER,
              "Draft tokens accepted, by position among the drafts.",
              drafts(lambda counts: {(at,): n for at, n in enumerate(counts.by_position)}),
              labels=(MODEL_NAME, "position")),
    MetricRow("podway_lora_tokens_total", COUNTER,
              "Tokens of ended requests by LoRA adapter; without a name, of the base model.",
              lambda r: r.lora_usage.tokens, labels=("lora", "kind")),
    MetricRow("vllm:lora_requests_info", GAUGE,
              "LoRA adapters of running and of waiting requests.", lambda r: r.lora_requests(),
              labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters")),

    # Iterations
    MetricRow("podway_iterations_total", COUNTER, "Iterations committed.",
              lambda r: r.metrics.num_iterations),
    MetricRow("podway_iteration_seconds", HISTOGRAM, "Duration of an iteration in the worker.",
              lambda r: r.metrics.iteration_seconds),
    MetricRow("podway_iteration_requests", HISTOGRAM, "Requests in an iteration.",
              lambda r: r.metrics.iteration_requests),
    MetricRow("podway_iteration_tokens", HISTOGRAM, "Tokens computed in an iteration.",
              lambda r: r.metrics.iteration_tokens, "vllm:iteration_tokens_total"),
    MetricRow("podway_policy_info", GAUGE, "Scheduling policy and admission.",
              lambda r: {(name_of(r.pool.policy), r.scheduler.settings.admission.value): 1},
              labels=("policy", "admission")),
    MetricRow("podway_itl_goal_seconds", GAUGE, "The ITL goal; 0 if there is none.",
              lambda r: r.itl_goal or 0.0),
    MetricRow("podway_itl_goal_steps_total", COUNTER,
              "Iterations with a decode that has an ITL goal.",
              lambda r: r.metrics.goal_steps, labels=("result",)),
    MetricRow("podway_cost_model_error", GAUGE,
              "Relative error of predicted iteration times, of the recent iterations.",
              lambda r: {"50": r.cost_error.median if r.cost_error else 0.0,
                         "90": r.cost_error.p90 if r.cost_error else 0.0},
              labels=("percentile",)),
    MetricRow("podway_worker_restarts_total", COUNTER, "Workers that died and were replaced.",
              lambda r: r.metrics.num_workers_lost),

    # KV memory
    MetricRow("podway_kv_slots", GAUGE, "KV slots by tier and state.",
              lambda r: {place: num_blocks * r.ledger.block_size
                         for place, num_blocks in r.kv_blocks.items()},
              labels=("tier", "state")),
    MetricRow("podway_orphan_blocks", GAUGE, "KV blocks owned by no live request; always 0.",
              lambda r: r.ledger.num_leaked(r.pool)),
    MetricRow("podway_swapped_blocks_total", COUNTER, "KV blocks moved between device and host.",
              lambda r: r.metrics.requests.swapped_blocks, labels=("direction",)),
    MetricRow("podway_kv_store_lookups_total", COUNTER,
              "Prompts that were looked up in the store of --kv-store.",
              lambda r: r.metrics.kv_lookups, labels=("outcome",)),
    MetricRow("vllm:cache_config_info", GAUGE, "Block size and number of KV blocks.",
              lambda r: {(r.ledger.block_size, r.ledger.num_blocks): 1},
              labels=(MODEL_NAME, "block_size", "num_gpu_blocks")),
    *(MetricRow(name, GAUGE, "Share of KV blocks in use, 0 to 1.",
                lambda r: r.num_used_blocks / r.ledger.num_blocks, labels=MODEL)
      for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),

    # The server
    MetricRow("podway_http_requests_total", COUNTER,
              "HTTP requests that ended or were rejected, and batch lines.",
              lambda r: r.request_log.requests, labels=("path", "method", "status")),
    MetricRow("http_requests_total", COUNTER,
              "HTTP requests by class of status, under the name that vLLM's dashboards use.",
              lambda r: r.http_requests_by_class(), labels=("handler", "method", "status")),
    MetricRow("podway_key_requests_total", COUNTER, "The same by API key.",
              lambda r: r.request_log.key_requests, labels=("key", "status"), is_per_key=True),
    MetricRow("podway_key_tokens_total", COUNTER, "Tokens of ended requests by API key.",
              lambda r: r.request_log.key_tokens, labels=("key", "kind"), is_per_key=True),
    MetricRow("podway_loop_lag_seconds", HISTOGRAM, "Delay of the event loop's timers.",
              lambda r: r.metrics.loop_lag),
    MetricRow("podway_traces_dropped_total", COUNTER, "Requests not traced: slow collector.",
              lambda r: r.metrics.num_dropped_traces),
    MetricRow("podway_kv_event_batches_dropped_total", COUNTER,
              "Batches of KV events not published: full queue.",
              lambda r: r.metrics.num_dropped_kv_events),
    MetricRow("podway_store_writable", GAUGE, "1 if the store can be written, 0 if it is full.",
              lambda r: r.database.is_writable),
)
# fmt: on
