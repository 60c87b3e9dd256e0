"""Verifies a recording: a new scheduler with the same inputs must make the same decisions.

The inputs (arrivals, step results, cancellations, the moments of planning) are taken from the
recording; the scheduler's decisions are recorded again and compared with it row by row. Golden
schedules are checked this way, and `podway simulate --replay` reports the recorded run's metrics.
"""

from collections import deque
from dataclasses import dataclass, replace

import msgspec

from engine.control.event_recorder import EventRecorder, render
from engine.cost.live import LiveCost
from engine.errors import RequestCancelled, StepFailed, Unavailable
from engine.iteration import Iteration, ObserverGroup
from engine.policy import build
from engine.request import Abort, FinishReason, Request
from engine.simulated.executor import VECTOR
from engine.simulated.figures import SLO, Figures, summarise
from engine.simulated.play import Outcome, PlayResult, RequestLost, outcome_of
from engine.simulated.record import Recorder
from engine.simulated.recording_rows import IterationRow
from engine.simulated.replay import RecordedOutputs, Recording, decode_row
from engine.step import Fault, StepResult

_PERIODS = 500  # samples of the state over time


@dataclass(frozen=True, slots=True)
class Verification:
    """Whether the schedule was reproduced, and the metrics of the recorded run.

    `difference` describes the first row that differs; None if all rows are equal. `figures` is
    None if there is a difference.
    """

    num_iterations: int
    difference: str | None
    figures: Figures | None


class RecordingVerifier:
    """A scheduler with the settings of a recording, driven by the recording's events."""

    def __init__(self, recording: Recording) -> None:
        header = recording.header
        self._recording = recording
        self._produced: list[IterationRow] = []
        span = recording.rows[-1].at - recording.rows[0].at
        self._recorder = Recorder(period=span / _PERIODS or 1.0)
        observers = ObserverGroup(self._recorder, EventRecorder(self._append, header.kv.block_size))
        self._scheduler = header.build(LiveCost(header.cost), observers)
        self._recorder.watch(self._scheduler)
        self._outputs = RecordedOutputs()
        self._requests: list[Request] = []
        self._in_flight: deque[Iteration] = deque()
        self._before: IterationRow | None = None

    def verify(self, slo: SLO) -> Verification:
        """Replay all rows, or up to the first one that differs. `slo` is for the metrics."""
        rows = self._recording.rows
        checked = 0
        for row in rows:
            self._apply(row)
            self._before = row
            while checked < min(len(self._produced), len(rows)):
                difference = _difference(rows[checked], self._produced[checked])
                if difference is not None:
                    line = f"line {checked + 2}: {difference}"
                    return Verification(self._recorder.num_iterations, line, None)
                checked += 1
        if checked < len(rows):
            line = f"line {checked + 2}: {_shown(rows[checked])} did not happen again"
            return Verification(self._recorder.num_iterations, line, None)
        return Verification(self._recorder.num_iterations, None, self._figures(slo))

    def _append(self, row: dict[str, object]) -> None:
        self._produced.append(decode_row(render(row, _without_name)))

    def _apply(self, row: IterationRow) -> None:
        """Repeat the call to the scheduler that the row records; a row of a decision has none."""
        scheduler, now = self._scheduler, row.at
        if row.arrived is not None:
            self._arrive(row.arrived, now)
        elif row.planned is not None or row.idled:
            self._plan(row)
        elif row.committed is not None:
            self._commit(row)
        elif row.failed is not None:
            scheduler.fail(self._in_flight.popleft(), StepFailed("as recorded"), now)
        elif row.cancelled is not None:
            scheduler.cancel(self._requests[row.cancelled], Abort(row.reason), now)
        elif row.switched is not None:
            settings = row.settings or self._recording.header.policies
            policy = build(row.switched, scheduler.cost, settings, serves=False)
            scheduler.switch(policy, now)
        elif row.lost:
            scheduler.lose_device(self._in_flight, now)
            self._in_flight.clear()
        elif row.given_up:
            scheduler.fail_all(Unavailable("as recorded"), now)

    def _plan(self, row: IterationRow) -> None:
        """Plan as `Engine` does: with lookahead it first tries without waiting for the steps in
        flight. The previous row says whether that attempt was already made."""
        header, before = self._recording.header, self._before
        oldest = None
        if header.lookahead and self._in_flight:
            is_full = len(self._in_flight) >= header.depth
            has_tried = before is not None and before.idled and before.at == row.at
            oldest = self._in_flight[0] if is_full or has_tried else None
        iteration = self._scheduler.plan(row.at, oldest)
        if iteration is not None:
            self._in_flight.append(iteration)

    def _arrive(self, number: int, now: float) -> None:
        """Add the request. A stop token ends it where it ended; other ends are later rows."""
        arrival, end = self._recording.arrivals[number], self._recording.ends.get(number)
        if end is None or end.reason != FinishReason.STOP.value:
            arrival = replace(arrival, ends_after=None)
        request = self._scheduler.add(arrival.spec(arrival.number), now)
        self._outputs.accepted(request, arrival)
        self._requests.append(request)

    def _commit(self, row: IterationRow) -> None:
        iteration = self._in_flight.popleft()
        step = iteration.step
        tokens = tuple(self._outputs(entry) for entry in step.entries if entry.sample is not None)
        faults = tuple(
            Fault(at, "as recorded")
            for at, request in enumerate(iteration.requests)
            if request.request_id in row.faults
        )
        vectors = tuple(VECTOR for entry in step.entries if entry.pooling is not None)
        result = StepResult(step.step_id, tokens, row.seconds, faults=faults, vectors=vectors)
        self._scheduler.commit(iteration, result, row.at)

    def _figures(self, slo: SLO) -> Figures:
        finished: list[Outcome] = []
        lost: list[RequestLost] = []
        start = self._requests[0].times.arrived_at
        for request in self._requests:
            arrival = self._recording.arrivals[request.request_id]
            if request.outcome == "finished" and (request.produced or request.spec.is_pooling):
                arrival = replace(arrival, output_len=request.produced)
                finished.append(outcome_of(arrival, request))
            else:
                error = request.error or RequestCancelled("the client disconnected")
                lost.append(RequestLost(arrival, error))
        figures = summarise("recorded", PlayResult(finished, lost), self._recorder, slo)
        moments = [moment._replace(at=moment.at - start) for moment in figures.moments]
        return replace(figures, moments=moments)


def _without_name(name: bytes | str) -> str:
    """Names of blocks, tenants and clients are salted per recording, and so not compared."""
    return ""


def _difference(recorded: IterationRow, produced: IterationRow) -> str | None:
    """A description of how the rows differ, or None if they are equal."""
    if _compared(recorded) == _compared(produced):
        return None
    return f"recorded {_shown(recorded)}, now {_shown(produced)}"


def _compared(row: IterationRow) -> IterationRow:
    arrival = row.arrival
    if arrival is not None:
        arrival = msgspec.structs.replace(arrival, blocks=(), tenant="", client="")
    return msgspec.structs.replace(row, blocks=(), arrival=arrival)


def _shown(row: IterationRow) -> str:
    return msgspec.json.encode(_compared(row)).decode()[:200]
