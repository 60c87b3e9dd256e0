"""The settings of all policies; each policy reads those that concern it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Seconds and weights; None leaves the choice to the policy.

    `starvation_seconds`: how long a request may wait for its next iteration before it is promoted.
    `seats`: requests in an iteration, for forecasts (`max_batch_size`).
    mlfq: `base_quantum` is the quantum of the highest queue in seconds (None: the time of the
    shortest iteration); each lower queue's is `ratio` times longer. Without `skips` every request
    joins the highest queue.
    gittins: the order is first come, first served until `min_outputs` outputs have ended by
    themselves. Without `starvation_seconds` a request goes first if its tokens are, or would be,
    later than under first come, first served, by more than `fcfs_slack` times its age.
    Over any policy: requests that can have their first token within `ttft_goal` seconds precede
    those that cannot (`GoodputFirst`; 0: no goal); with `fair_keys` API keys get equal shares, and
    the policy orders the requests of each key (`VirtualTokenCounter`, as under fair).
    fair: a prompt token counts `input_weight`, an output token `output_weight`.
    """

    starvation_seconds: float | None = None
    seats: int = 64
    base_quantum: float | None = None
    ratio: float = 2.0
    num_levels: int = 16
    skips: bool = True
    min_outputs: int = 50
    fcfs_slack: float = 0.005
    input_weight: float = 1.0
    output_weight: float = 2.0
    ttft_goal: float = 0.0
    fair_keys: bool = False

    def __post_init__(self) -> None:
        limit = self.starvation_seconds
        assert limit is None or limit > 0.0, "starvation_seconds is positive"
        assert self.ratio > 1.0, "ratio is above 1"
        assert self.num_levels > 0, "num_levels is positive"
        assert self.min_outputs > 0, "min_outputs is positive"
        assert self.ttft_goal >= 0.0, "ttft_goal is not negative"
        assert self.fcfs_slack >= 0.0, "fcfs_slack is not negative"
        assert self.input_weight > 0.0, "input_weight is positive"
        assert self.output_weight > 0.0, "output_weight is positive"
