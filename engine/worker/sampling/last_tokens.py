"""The tokens that a worker sampled last, for entries planned before the scheduler knew them.

An entry whose token is `LAST_TOKEN` continues from the token that an earlier step sampled. Steps
run in order, so the token is sampled by then. On a CPU the host knows it; on a GPU it may be on the
device only, where the layers read it, so that the host need not wait for it.

If that step or its entry failed, the scheduler discards the result of this entry too; with
`FAILED_TOKEN`, or any other one, the rest of the batch runs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.step import LAST_TOKEN, RequestId, Step
from engine.worker.ports import Int64s

FAILED_TOKEN = 0  # stands for a row whose request has failed; a valid id, whose result is discarded


class SampledTokens(Protocol):
    """One token per sampled row of a step; any token where sampling failed."""

    @property
    def ids(self) -> Tensor | None:
        """int64 on the device; None if the step samples nothing, or only the host has them."""

    @property
    def is_known(self) -> bool:
        """Whether the host has them."""

    def known(self) -> Sequence[int]:
        """The tokens on the host; waits for their copy."""


@dataclass(frozen=True, slots=True, eq=False)
class KnownTokens:
    """Tokens that the host has."""

    tokens: Sequence[int]
    ids = None
    is_known = True

    def known(self) -> Sequence[int]:
        return self.tokens


class _Opened(NamedTuple):
    """A step, and the row of each request that it samples for."""

    step_id: int
    rows: dict[RequestId, int]
    sampled: SampledTokens | None  # None if the step failed, or has not sampled yet


class _Place(NamedTuple):
    """Where the last token of a request is."""

    sampled: SampledTokens | None
    row: int


NO_ROWS: Int64s = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Continued:
    """The tokens that the `LAST_TOKEN` entries of a step continue from, in the entries' order."""

    places: tuple[_Place, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether the host has all of them."""
        return all(each.is_known for each in self._steps)

    @property
    def _steps(self) -> set[SampledTokens]:
        """The steps that sampled them: few, each of which is asked once, not for each row."""
        return {sampled for sampled, _ in self.places if sampled is not None}

    def complete(self, step: Step) -> Step:
        """The step with the tokens; waits for those that the host does not have."""
        if not self.places:
            return step
        tokens = iter(self.tokens())
        return replace(
            step,
            entries=tuple(
                [
                    entry._replace(tokens=(next(tokens),))
                    if entry.tokens[0] == LAST_TOKEN
                    else entry
                    for entry in step.entries
                ]
            ),
        )

    def tokens(self) -> list[int]:
        """The tokens on the host."""
        known = {each: each.known() for each in self._steps}
        return [
            FAILED_TOKEN if sampled is None else known[sampled][row] for sampled, row in self.places
        ]

    def on_device(self) -> tuple[Tensor | None, Int64s, Int64s]:
        """Ids on the device, those of them that are needed, and the numbers of the entries that
        need them, counted among the places. Entries of failed steps keep what they have."""
        if not self.places:
            return None, NO_ROWS, NO_ROWS
        numbers = [at for at, place in enumerate(self.places) if place.sampled is not None]
        steps = list(dict.fromkeys([self.places[at].sampled for at in numbers]))
        ids = [each.ids for each in steps if each is not None and each.ids is not None]
        if not ids:
            return None, NO_ROWS, NO_ROWS
        assert len(ids) == len(steps), "all tokens are on the device, or all are on the host"
        ends = np.cumsum([0, *map(len, ids)])
        first = dict(zip(steps, ends.tolist(), strict=False))
        rows = [first[self.places[at].sampled] + self.places[at].row for at in numbers]
        joined = ids[0] if len(ids) == 1 else torch.cat(ids)
        return joined, np.array(rows, dtype=np.int64), np.array(numbers, dtype=np.int64)


NOTHING_CONTINUED = Continued()


class LastTokens:
    """Tokens of the last `num_steps` steps; `open` is called before anything in a step can fail."""

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[_Opened] = deque(maxlen=num_steps + 1)

    def open(self, step: Step) -> None:
        """The step is about to run; it has no tokens until `keep` is called."""
        rows: dict[RequestId, int] = {}
        row = 0
        for entry in step.entries:
            if entry.sample is not None:
                rows[entry.request_id] = row
                row += 1 + entry.num_drafts
        self._steps.append(_Opened(step.step_id, rows, None))

    def keep(self, sampled: SampledTokens) -> None:
        """The open step has sampled these tokens, or is about to."""
        self._steps[-1] = self._steps[-1]._replace(sampled=sampled)

    def fill(self, step_id: int, tokens: Sequence[int]) -> None:
        """Set the tokens of a step, one per entry that samples, unless it is too old."""
        for at, opened in enumerate(self._steps):
            if opened.step_id == step_id:
                rows = {request_id: row for row, request_id in enumerate(opened.rows)}
                self._steps[at] = _Opened(opened.step_id, rows, KnownTokens(tokens))

    def continued(self, step: Step) -> Continued:
        """What the open step's entries continue from.

        Raises `ValueError` if no earlier step sampled a token for such a request.
        """
        earlier = list(self._steps)[-2::-1]  # the last is the current step
        places = [
            _place(entry.request_id, earlier)
            for entry in step.entries
            if entry.tokens[0] == LAST_TOKEN
        ]
        return Continued(tuple(places)) if places else NOTHING_CONTINUED


def _place(request_id: RequestId, earlier: list[_Opened]) -> _Place:
    for opened in earlier:
        row = opened.rows.get(request_id)
        if row is not None:
            return _Place(opened.sampled, row)
    raise ValueError(f"request {request_id}: its last token is not on this worker")
