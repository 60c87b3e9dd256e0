"""The settings of all policies; each policy reads those that concern it."""

from dataclasses import dataclass

from engine.setting import advanced, setting


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Seconds and weights; None leaves the choice to the policy.

    `starvation_seconds`: how long a request may wait for its next iteration before it is promoted.
    `seats`: requests in an iteration, for forecasts (`max_batch_size`).
    mlfq: `base_quantum` is the quantum of the highest queue in seconds (None: the time of the
    shortest iteration); each lower queue's is `ratio` times longer. Without `skips` every request
    joins the highest queue.
    Over any policy: requests that can have their first token within `ttft_goal` seconds precede
    those that cannot (`GoodputFirst`; 0: no goal); with `fair_keys` API keys get equal shares, and
    the policy orders the requests of each key (`VirtualTokenCounter`, as under fair).
    fair: a prompt token counts `input_weight`, an output token `output_weight`.
    """

    starvation_seconds: float | None = advanced(
        None,
        "scheduling",
        "a request that waits longer between two iterations runs first; default: the policy's own",
        "SECONDS",
        gt=0,
    )
    seats: int = 64
    base_quantum: float | None = advanced(
        None,
        "scheduling",
        "mlfq: quantum of the highest queue; default: the shortest iteration",
        "SECONDS",
        gt=0,
    )
    ratio: float = advanced(
        2.0,
        "scheduling",
        "mlfq: quantum of a queue over that of the next higher one",
        "X",
        name="quantum_ratio",
        gt=1,
    )
    num_levels: int = advanced(16, "scheduling", "mlfq: number of queues", "N", ge=1, le=64)
    skips: bool = advanced(
        True,
        "scheduling",
        "mlfq: the queue that a request joins follows from its prompt's length",
        name="skip_join",
    )
    input_weight: float = advanced(
        1.0, "scheduling", "fair, --fair-keys: cost of a prompt token", "W", gt=0
    )
    output_weight: float = advanced(
        2.0, "scheduling", "fair, --fair-keys: cost of an output token", "W", gt=0
    )
    ttft_goal: float = setting(
        0.0,
        "scheduling",
        "goal for the time to the first token, such as 2s: requests that can meet it run before "
        "those that cannot, under any policy; 0: no goal",
        "DURATION",
        unit="seconds",
        ge=0,
    )
    fair_keys: bool = setting(
        False,
        "scheduling",
        "API keys get equal shares, and --policy orders the requests of each key",
    )

    def __post_init__(self) -> None:
        limit = self.starvation_seconds
        assert limit is None or limit > 0.0, "starvation_seconds is positive"
        assert self.ratio > 1.0, "ratio is above 1"
        assert self.num_levels > 0, "num_levels is positive"
        assert self.ttft_goal >= 0.0, "ttft_goal is not negative"
        assert self.input_weight > 0.0, "input_weight is positive"
        assert self.output_weight > 0.0, "output_weight is positive"
