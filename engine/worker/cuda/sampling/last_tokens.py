"""The tokens of the step before, on the device: entries planned ahead go on from them there.

As `engine.worker.model.last_tokens`, where the host need not know a token before the next step is
launched. Who reads the output to draw (penalties, a grammar) does need it on the host: that is
waited for only when the layers of the step that asks have been given to the device.
"""

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from engine.step import LAST_TOKEN, RequestId, Step, StepEntry
from engine.worker.model.layout import Int64s


class LastTokensTensor(Protocol):
    """One token per draw of a step; stand-ins where the draw failed."""

    @property
    def ids(self) -> Tensor | None:
        """int64, on the device; None if there is no draw."""
        ...

    def known(self) -> list[int]:
        """The same, on the host; waits for them."""
        ...


class _LastToken(NamedTuple):
    places: dict[RequestId, int]
    drawn: LastTokensTensor | None  # None where the step failed: then all are stand-ins


class Source(NamedTuple):
    """Where an entry's held token lies among those of the step before."""

    ids: Tensor | None  # None: all are stand-ins
    places: Int64s


NOTHING_HELD = Source(None, np.zeros(0, dtype=np.int64))


class DeviceLastTokens:
    """Of the last step and the one that runs; a step is opened before anything can fail in it."""

    def __init__(self) -> None:
        self._before = self._now = _LastToken({}, None)

    def open(self, step: Step) -> None:
        """The step is about to be launched: until `keep` there are stand-ins for its tokens."""
        draws = [entry.request_id for entry in step.entries if entry.sample is not None]
        self._before = self._now
        self._now = _LastToken({request_id: at for at, request_id in enumerate(draws)}, None)

    def keep(self, drawn: LastTokensTensor) -> None:
        """The step that is open has drawn."""
        self._now = self._now._replace(drawn=drawn)

    def source(self, step: Step) -> Source:
        """Where the tokens that the open step's entries hold back are, in their order.

        Raises `ValueError` where no token is held.
        """
        held = [entry.request_id for entry in step.entries if entry.tokens[0] == LAST_TOKEN]
        if not held:
            return NOTHING_HELD
        places = np.array([self._place(request_id) for request_id in held], dtype=np.int64)
        return Source(None if self._before.drawn is None else self._before.drawn.ids, places)

    def complete(self, step: Step) -> Step:
        """The open step with the held tokens of those who read the output; may wait for them."""
        if not any(_asks(entry) for entry in step.entries):
            return step
        drawn = self._before.drawn
        known = [0] * len(self._before.places) if drawn is None else drawn.known()
        entries = tuple([self._completed(entry, known) for entry in step.entries])
        return replace(step, entries=entries)

    def _completed(self, entry: StepEntry, known: list[int]) -> StepEntry:
        if not _asks(entry) or entry.sample is None:
            return entry
        token = known[self._place(entry.request_id)]
        draw = entry.sample._replace(output=(*entry.sample.output, token))
        return entry._replace(tokens=(token,), sample=draw)

    def _place(self, request_id: RequestId) -> int:
        if request_id not in self._before.places:
            raise ValueError(f"request {request_id}: no token of it is held")
        return self._before.places[request_id]


def _asks(entry: StepEntry) -> bool:
    """Whether the host has to know the token that the entry goes on from."""
    draw = entry.sample
    return entry.tokens[0] == LAST_TOKEN and draw is not None and draw.reads_output
