"""One turn of the scheduler: the message for the workers, and whom it is for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.request import Request
    from engine.step import Step, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Iteration:
    """A `Step` and its requests, in the order of the step's entries."""

    step: "Step"
    requests: "tuple[Request, ...]"


class Delivery(NamedTuple):
    """A token for a request that is still wanted, or None: it has failed instead."""

    request: "Request"
    token: int | None
    logprobs: "TokenLogprobs | None" = None
