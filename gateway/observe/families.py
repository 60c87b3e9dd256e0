"""Metric families: their names and help texts, and counters with labels."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, Metric

if TYPE_CHECKING:
    from gateway.observe.metrics import Histogram, Metrics


class Described(NamedTuple):
    """A metric's name and help text; `alias` is vLLM's name, "" if it has none."""

    name: str
    help: str
    alias: str = ""


def labelled(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    """A counter with one label; the counts' keys are the label's values."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


Labels = TypeVar("Labels", bound=tuple[str | int, ...])


def table(name: str, text: str, labels: tuple[str, ...], counts: Mapping[Labels, int]) -> Metric:
    """A counter with several labels; the counts' keys are the labels' values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric([str(value) for value in values], count)
    return family


def histograms_of(metrics: "Metrics") -> "list[tuple[Described, Histogram]]":
    """Every histogram with its name."""
    return [
        (
            Described("podway_iteration_seconds", "Duration of an iteration in the worker."),
            metrics.iteration_seconds,
        ),
        (
            Described("podway_iteration_requests", "Requests in an iteration."),
            metrics.iteration_requests,
        ),
        (
            Described(
                "podway_iteration_tokens",
                "Tokens computed in an iteration.",
                "vllm:iteration_tokens_total",
            ),
            metrics.iteration_tokens,
        ),
        (
            Described(
                "podway_time_to_first_token_seconds",
                "From arrival to the first token (TTFT).",
                "vllm:time_to_first_token_seconds",
            ),
            metrics.time_to_first_token,
        ),
        (
            Described(
                "podway_inter_token_seconds",
                "Between two tokens of a request (ITL).",
                "vllm:inter_token_latency_seconds",
            ),
            metrics.inter_token,
        ),
        (
            Described(
                "podway_request_seconds",
                "From arrival to the last token (JCT).",
                "vllm:e2e_request_latency_seconds",
            ),
            metrics.request_seconds,
        ),
        (
            Described(
                "podway_queue_seconds",
                "From arrival to the first KV slot.",
                "vllm:request_queue_time_seconds",
            ),
            metrics.queue_seconds,
        ),
        (
            Described(
                "podway_prefill_seconds",
                "From the first KV slot to the first token.",
                "vllm:request_prefill_time_seconds",
            ),
            metrics.prefill_seconds,
        ),
        (
            Described(
                "podway_decode_seconds",
                "From the first token to the last one.",
                "vllm:request_decode_time_seconds",
            ),
            metrics.decode_seconds,
        ),
        (
            Described(
                "podway_request_prompt_tokens",
                "Prompt tokens of a finished request.",
                "vllm:request_prompt_tokens",
            ),
            metrics.prompt_tokens,
        ),
        (
            Described(
                "podway_request_generation_tokens",
                "Output tokens of a finished request.",
                "vllm:request_generation_tokens",
            ),
            metrics.generation_tokens,
        ),
        (
            Described(
                "podway_cancel_to_free_iterations",
                "Iterations from a cancel until its KV slots are free.",
            ),
            metrics.cancel_to_free,
        ),
        (
            Described("podway_loop_lag_seconds", "Delay of the event loop's timers."),
            metrics.loop_lag,
        ),
    ]
