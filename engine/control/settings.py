"""SchedulerSettings: the bounds within which the scheduler plans."""

from dataclasses import dataclass
from math import inf

from engine.control.admission import Admission, SwapMode
from engine.setting import advanced, setting


def _check_factor(factor: float) -> None:
    """Raise `ValueError` for a factor from 0 to 1; 0 itself stands for no limit."""
    if 0.0 < factor <= 1.0:
        raise ValueError(f"must be above 1, or 0 for no limit, not {factor:g}")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of an iteration, of the queue, and of unfairness. Seconds and tokens."""

    max_model_len: int
    max_batch_size: int = setting(
        64, "scheduling", "maximum requests in an iteration", "N", ge=1, le=65536
    )
    max_batch_tokens: int = setting(
        512,
        "scheduling",
        "maximum tokens in an iteration; longer prompts are computed in chunks",
        "TOKENS",
        ge=1,
    )
    admission: Admission = advanced(
        Admission.GROW,
        "scheduling",
        "grow: allocate KV blocks as needed, preempt when they run out; reserve: allocate for "
        "prompt + max_tokens on admission; request: static batches, one after the other "
        "(a baseline)",
    )
    max_queue_requests: int = setting(
        2048,
        "scheduling",
        "maximum waiting requests; further ones get a 503, those of clients with less than their "
        "share of them beyond twice as many",
        "N",
        ge=1,
    )
    max_queue_tokens: int = advanced(
        1 << 20,
        "scheduling",
        "maximum tokens (prompt + max_tokens) of the waiting requests; further ones get a 503",
        "TOKENS",
        ge=1,
    )
    max_step_overs: int = 64
    max_preemptions: int = 3
    swap: SwapMode = advanced(
        SwapMode.PROACTIVE,
        "memory",
        "when requests are swapped to the host tier (--host-kv-memory); proactive: before blocks "
        "run out, under policies that preempt; reactive: when blocks run out; off: never",
    )
    max_crashes: int = 3
    reuses_prefixes: bool = setting(
        True,
        "memory",
        "keep the KV blocks of finished requests while there is room, for prompts with the same "
        "prefix",
        name="prefix_cache",
    )
    chunks_prompts: bool = True  # False: each prompt is computed in one iteration
    scan_limit: int = 16  # waiting requests that are tried per plan and do not fit, or do not start
    max_step_seconds: float = advanced(
        inf,
        "scheduling",
        "target for the duration of an iteration that contains a prompt chunk, which bounds the "
        "ITL of running requests; 0: no target",
        "SECONDS",
        ge=0,
        zero=inf,
    )
    itl_goal: float = setting(
        inf,
        "scheduling",
        "goal for the time between two tokens, such as 50ms: it bounds the prompt tokens beside "
        "decodes, and keeps requests waiting beyond what the goal allows; 0: no goal",
        "DURATION",
        unit="seconds",
        ge=0,
        zero=inf,
    )
    max_prefill_slowdown: float = setting(
        inf,
        "scheduling",
        "how much longer an iteration with running requests may take because of prompts, as a "
        "factor (more while few decode and many have a prompt to compute, and up to twice "
        "the factor once prompts have waited while seats are free; twice the factor for a client "
        "that is alone, up to 0.1 s between two tokens); a prompt takes F / (F - 1) "
        "times as long; 0: no limit but --max-step-seconds. With --itl-goal the goal alone counts",
        "FACTOR",
        name="prefill_slowdown",
        ge=0,
        zero=inf,
        check=_check_factor,
    )
    max_background_slowdown: float = setting(
        inf,
        "scheduling",
        "how much longer an iteration with other requests may take because of batch lines, as a "
        "factor; 1: batch lines run only while there are no other requests",
        "FACTOR",
        name="background_slowdown",
        ge=1,
    )

    encoder_memory: int = advanced(
        256 << 20,
        "memory",
        "size of the cache of encoded images, which prompts with the same image share",
        "SIZE",
        unit="bytes",
        ge=1,
    )

    def __post_init__(self) -> None:
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"--max-batch-tokens ({self.max_batch_tokens}) must be at least --max-batch-size "
                f"({self.max_batch_size}): each request needs a token"
            )
        assert self.chunks_prompts or self.max_batch_tokens >= self.max_model_len, (
            "a whole prompt fits into an iteration"
        )
