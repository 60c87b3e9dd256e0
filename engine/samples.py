"""Samples: how the tokens of a request are sampled, as far as its worker has been told."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.step import SampleSpec, StepId

LATE_INTERVAL = 16  # tokens; see `Samples.may_be_late`


@dataclass(slots=True)
class Samples:
    """What is remembered between the tokens of one request."""

    constant: "SampleSpec | None" = None  # if the same for all its tokens
    # How to sample a token that is not late, if the worker has its output; the same for all of
    # them, except before `min_tokens`: then it stays None
    continuing: "SampleSpec | None" = None
    sampled_at: "StepId | None" = None  # the last step that sampled it with its present KV
    produced_at_start: int = 0  # output tokens when it last got its KV
    has_slow_masks: bool = False  # a mask of its grammar, which was compiled, was late

    def may_be_late(self, index: int) -> bool:
        """Whether output token `index` of a request with a grammar may be late because of it, so
        that no iteration can be planned ahead of it. The first token after it got its KV may be,
        since the worker may have to compile the grammar; every `LATE_INTERVAL`-th, to find out
        whether masks are slow; and all if one was."""
        return self.has_slow_masks or (index - self.produced_at_start) % LATE_INTERVAL == 0

    def was_late(self, index: int) -> None:
        """The worker did not have the mask of output token `index` in time, so it got no token."""
        if index > self.produced_at_start:  # otherwise the grammar was being compiled
            self.has_slow_masks = True
