"""The last sampled token of each request, on the device, where the next step reads it.

The device-side counterpart of `engine.worker.model.last_tokens`: the next step is launched before
the host knows the tokens. A row whose sampling reads its own output (penalties, a grammar) does
need its token on the host; the host waits for it only after this step's layers were submitted.
"""

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.step import LAST_TOKEN, RequestId, Step, StepEntry
from engine.worker.ports import Int64s


class LastTokensTensor(Protocol):
    """One token per sampled row of a step; any token where sampling failed, since that request has
    failed."""

    @property
    def ids(self) -> Tensor | None:
        """int64 on the device; None if the step samples nothing."""
        ...

    def known(self) -> list[int]:
        """The same on the host; waits for the copy."""
        ...


class _LastToken(NamedTuple):
    places: dict[RequestId, int]
    sampled: LastTokensTensor | None  # None if the step failed, and its requests with it


class Source(NamedTuple):
    """Positions of the needed tokens among those of the previous step."""

    ids: Tensor | None  # None: the step failed, so results behind its tokens are discarded
    places: Int64s


NO_SOURCE = Source(None, np.zeros(0, dtype=np.int64))


class DeviceLastTokens:
    """The tokens of the last two steps; a step is opened before anything in it can fail."""

    def __init__(self) -> None:
        self._before = self._now = _LastToken({}, None)

    def open(self, step: Step) -> None:
        """Begin a step: its tokens are not there until `keep` is called."""
        specs = [entry.request_id for entry in step.entries if entry.sample is not None]
        self._before = self._now
        self._now = _LastToken({request_id: at for at, request_id in enumerate(specs)}, None)

    def keep(self, sampled: LastTokensTensor) -> None:
        """Keep the tokens that the open step sampled."""
        self._now = self._now._replace(sampled=sampled)

    def source(self, step: Step) -> Source:
        """Where the tokens are that the open step's entries continue from, in the entries' order.

        Raises `ValueError` if the previous step sampled no token for such a request.
        """
        held = [entry.request_id for entry in step.entries if entry.tokens[0] == LAST_TOKEN]
        if not held:
            return NO_SOURCE
        places = np.array([self._place(request_id) for request_id in held], dtype=np.int64)
        return Source(None if self._before.sampled is None else self._before.sampled.ids, places)

    def complete(self, step: Step) -> Step:
        """The open step with the tokens filled in that the host needs; may wait for them."""
        if not any(_needs_token(entry) for entry in step.entries):
            return step
        sampled = self._before.sampled
        known = [0] * len(self._before.places) if sampled is None else sampled.known()
        entries = tuple([self._completed(entry, known) for entry in step.entries])
        return replace(step, entries=entries)

    def _completed(self, entry: StepEntry, known: list[int]) -> StepEntry:
        if not _needs_token(entry) or entry.sample is None:
            return entry
        token = known[self._place(entry.request_id)]
        return entry._replace(tokens=(token,))

    def _place(self, request_id: RequestId) -> int:
        if request_id not in self._before.places:
            raise ValueError(f"request {request_id}: its last token is not on this worker")
        return self._before.places[request_id]


def _needs_token(entry: StepEntry) -> bool:
    """Whether the host needs the token that the entry continues from."""
    spec = entry.sample
    return entry.tokens[0] == LAST_TOKEN and spec is not None and spec.reads_output
