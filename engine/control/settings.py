"""SchedulerSettings: the bounds within which the scheduler plans."""

from dataclasses import dataclass
from math import inf

from engine.control.admission import Admission, SwapMode


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Bounds of an iteration, of the queue, and of unfairness. Seconds and tokens."""

    max_model_len: int
    max_batch_size: int = 64
    max_batch_tokens: int = 512
    admission: Admission = Admission.GROW
    max_queue_requests: int = 2048
    max_queue_tokens: int = 1 << 20
    max_step_overs: int = 64
    max_preemptions: int = 3
    swap: SwapMode = SwapMode.PROACTIVE  # with a host tier only
    max_crashes: int = 3
    reuses_prefixes: bool = True
    chunks_prompts: bool = True  # False: each prompt is computed in one iteration
    scan_limit: int = 16  # waiting requests that are tried per plan and do not fit
    max_step_seconds: float = inf  # of an iteration with decodes and a chunk of a prompt
    itl_goal: float = inf  # seconds of an iteration with decodes: engine.control.step_time
    max_prefill_slowdown: float = inf  # factor on an iteration with decodes, because of prompts
    max_background_slowdown: float = inf  # factor on an iteration with others

    def __post_init__(self) -> None:
        assert self.max_batch_tokens >= self.max_batch_size, (
            "max_batch_tokens is at least max_batch_size"
        )
        assert self.chunks_prompts or self.max_batch_tokens >= self.max_model_len, (
            "a whole prompt fits into an iteration"
        )
