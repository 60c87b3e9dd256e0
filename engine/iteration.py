"""One turn of the scheduler: the message for the workers, and whom it is for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.request import Request
    from engine.step import BlockMove, Fault, Step, StepResult, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Iteration:
    """A `Step` and its requests, in the order of the step's entries.

    `riders` are in none of its entries: their KV moves between the tiers in it.
    """

    step: "Step"
    requests: "tuple[Request, ...]"
    riders: "tuple[Request, ...]" = ()

    def strays(self, result: "StepResult") -> "dict[Request, Fault | None]":
        """Who has no result, and why; None for who is late."""
        strays: dict[Request, Fault | None] = {self.requests[at]: None for at in result.late}
        strays.update((self.requests[fault.entry], fault) for fault in result.faults)
        return strays


class Swaps(NamedTuple):
    """What an iteration moves between the tiers, and whose KV moves without being in its batch."""

    moves: "tuple[BlockMove, ...]"
    riders: "tuple[Request, ...]"


NO_SWAPS = Swaps((), ())


class Delivery(NamedTuple):
    """A token for a request that is still wanted, or None: it has failed instead."""

    request: "Request"
    token: int | None
    logprobs: "TokenLogprobs | None" = None
