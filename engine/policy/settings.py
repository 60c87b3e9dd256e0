"""The knobs of all policies in one place; a policy reads what concerns it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Seconds and weights; None leaves the choice to the policy.

    `starvation_seconds`: how long a request may wait between two iterations before it is put
    ahead. `seats`: requests that an iteration takes, for forecasts (`max_batch_size`).
    mlfq: `base_quantum` is that of the highest queue (None: the shortest iteration), each next
    one's is `ratio` times longer; without `skips` everybody joins the highest queue.
    fair: a token of a prompt counts `input_weight`, a token of an answer `output_weight`.
    """

    starvation_seconds: float | None = None
    seats: int = 64
    base_quantum: float | None = None
    ratio: float = 2.0
    num_levels: int = 16
    skips: bool = True
    input_weight: float = 1.0
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        limit = self.starvation_seconds
        assert limit is None or limit > 0.0, "nobody starves in no time"
        assert self.ratio > 1.0, "quanta grow from queue to queue"
        assert self.num_levels > 0, "there is at least one queue"
        assert self.input_weight > 0.0, "a computed token counts"
        assert self.output_weight > 0.0, "a computed token counts"
