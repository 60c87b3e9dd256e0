"""Reads a recording: its requests become arrivals, its iterations become samples of step costs.

A recording has no tokens, only hashes of blocks. Synthetic tokens are chosen such that blocks
with equal hashes are equal again, in prompts and outputs, and each output ends where it did.
"""

import gzip
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import msgspec

from engine.control.event_recorder import VERSION, RecordingHeader
from engine.cost.fit import Sample, fit
from engine.cost.live import ErrorSummary
from engine.cost.model import CostModel
from engine.errors import InvalidRequest
from engine.kv_shape import KVShape
from engine.pooling import PoolSpec
from engine.request import Abort, Caching, FinishReason, Request, RequestSpec
from engine.simulated.recording_rows import ArrivalRow, IterationRow
from engine.simulated.trace import GREEDY, Arrival
from engine.step import StepEntry

END = (1 << 31) - 1  # the stop token of synthetic outputs
_FIRST_UNIQUE = 1 << 30  # token ids from here on belong to one request only
_FEWEST_SAMPLES = 20  # with fewer, the cost model in the recording's header is used


class BadRecording(InvalidRequest):
    """A file that is not a recording of this version; the message names file and line."""


@dataclass(frozen=True, slots=True)
class RecordedRequest(Arrival):
    """An arrival of a recording. Equal `names` stand for equal contents of its leading blocks."""

    params: RequestSpec | None = None  # the request without its prompt
    names: tuple[int, ...] = ()
    block_size: int = 1
    number: int = 0
    ends_after: int | None = None  # output tokens, if the output ended before `max_tokens`

    def spec(self, index: int) -> RequestSpec:
        assert self.params is not None, "a recorded arrival has params"
        return replace(self.params, prompt=self.prompt(index))

    def prompt(self, index: int) -> tuple[int, ...]:
        size, tokens = self.block_size, []
        for name in self.names[: self.prompt_len // size]:
            tokens += [name] * size
        rest = range(len(tokens), self.prompt_len)
        return (*tokens, *map(self._at, rest))

    def token(self, position: int) -> int:
        """The output token at a position counted from the start of the prompt."""
        if self.ends_after == position - self.prompt_len + 1:
            return END
        return self._at(position)

    def _at(self, position: int) -> int:
        block = position // self.block_size
        return self.names[block] if block < len(self.names) else _FIRST_UNIQUE + self.number

    def with_known_length(self) -> "RecordedRequest":
        """The same with `max_tokens` set to the output's length, for an oracle policy."""
        assert self.params is not None, "a recorded arrival has params"
        return replace(self, params=replace(self.params, max_tokens=self.output_len))


class RecordedOutputs:
    """The output tokens of a replay, as `SimulatedExecutor` asks for them."""

    def __init__(self) -> None:
        self._arrivals: dict[int, RecordedRequest] = {}

    def accepted(self, request: Request, arrival: Arrival) -> None:
        """Use the recorded output of `arrival` for this request."""
        assert isinstance(arrival, RecordedRequest), "the arrival of a recording"
        self._arrivals[request.request_id] = arrival

    def __call__(self, entry: StepEntry) -> int:
        position = entry.start + len(entry.tokens)
        return self._arrivals[entry.request_id].token(position)

    def next_tokens(self, request: Request, count: int) -> list[int]:
        """The next output tokens of the request."""
        arrival, known = self._arrivals[request.request_id], request.num_tokens
        return [arrival.token(position) for position in range(known, known + count)]

    def num_left(self, request: Request) -> int:
        """Output tokens until one ends the request; `max_tokens` may end it earlier."""
        ends_after = self._arrivals[request.request_id].ends_after
        most = request.spec.max_tokens
        return (most if ends_after is None else ends_after) - request.produced


@dataclass(frozen=True)
class Recording:
    """A recording in memory; `rows` are its events in order."""

    path: Path
    header: RecordingHeader
    rows: tuple[IterationRow, ...]

    @cached_property
    def ends(self) -> dict[int, IterationRow]:
        """The row at which each request ended, by request."""
        return {row.ended: row for row in self.rows if row.ended is not None}

    @cached_property
    def arrivals(self) -> list[RecordedRequest]:
        """The arrivals by request number; the first one is at 0 s."""
        names: dict[Hashable, int] = {}
        left = {row.cancelled: row for row in self.rows if row.cancelled is not None}
        rows = [row.arrival for row in self.rows if row.arrival is not None]
        return [self._arrival(row, rows[0].at, left, names) for row in rows]

    def _arrival(
        self,
        row: ArrivalRow,
        start: float,
        left: dict[int, IterationRow],
        names: dict[Hashable, int],
    ) -> RecordedRequest:
        end, leaving = self.ends.get(row.arrived), left.get(row.arrived)
        is_gone = leaving is not None and leaving.reason in _BY_THE_CLIENT
        ends_after = None if is_gone else _ends_after(row, end)
        blocks = (*row.blocks, *(end.blocks if end is not None else ()))
        return RecordedRequest(
            at=row.at - start,
            prompt_len=row.prompt,
            output_len=ends_after or row.max_tokens,
            patience=leaving.at - row.at if leaving is not None and is_gone else None,
            params=_params(row),
            names=tuple(names.setdefault(block, len(names)) for block in blocks),
            block_size=self.header.kv.block_size,
            number=row.arrived,
            ends_after=ends_after,
        )

    def cost(self) -> CostModel:
        """The cost model fitted to the recorded iterations and to the idle times between them."""
        samples = list(self.samples())
        try:
            if len(samples) < _FEWEST_SAMPLES:
                return self.header.cost
            return fit(samples, *self.idle(), graphs=self.header.cost.graphs)
        except ValueError:  # all iterations have the same size
            return self.header.cost

    def cost_error(self) -> ErrorSummary | None:
        """How far the fitted cost model is from the recorded iterations; None if there are none."""
        model, errors = self.cost(), []
        for sample in self.samples():
            predicted = sample.predicted(model)
            if predicted > 0.0:
                errors.append(abs(sample.seconds / predicted - 1.0))
        return ErrorSummary.of(errors)

    def samples(self) -> Iterator[Sample]:
        """Each committed iteration. An entry samples a token if it reaches the last known one."""
        arrivals = [row.arrival for row in self.rows if row.arrival is not None]
        known = {row.arrived: row.prompt for row in arrivals}
        planned: dict[int, Sample] = {}
        for row in self.rows:
            if row.planned is not None:
                tokens = slots = num_sampled = num_pieces = 0
                pairs = 0.0
                for request, start, count in row.entries:
                    tokens, slots = tokens + count, slots + start + count
                    if count > 1:
                        pairs += count * (start + (count + 1) / 2)
                        num_pieces += 1
                    if start + count >= known[request]:
                        known[request] = start + count + 1
                        num_sampled += 1
                sample = Sample(tokens, slots, pairs, num_sampled, 0.0, num_pieces)
                planned[row.planned] = sample
            elif row.committed is not None and not row.faults:
                yield planned[row.committed]._replace(seconds=row.seconds)

    def idle(self) -> tuple[float, float]:
        """Seconds that the worker is idle around a step: the part per step and per request.

        With one step in flight the worker is idle until the next plan, if there are live
        requests; with more it already has the next step.
        """
        points: list[tuple[int, float]] = []
        plans: dict[int, IterationRow] = {}
        # Plan and commit of the last step, until the next plan.
        waiting: tuple[IterationRow, IterationRow] | None = None
        live, before = 0, 0.0
        for row in self.rows:
            live += (row.arrived is not None) - (row.ended is not None)
            if row.planned is not None:
                plans[row.planned] = row
                if waiting is not None:
                    points.append(_waited(*waiting, until=row.at))
                    waiting = None
            elif row.committed is not None:
                plan = plans.pop(row.committed)
                if self.header.depth == 1 and live:
                    waiting = plan, row
                else:
                    points.append(_waited(plan, row, until=row.at, since=before))
                before = row.at
        return _line(points)


def _waited(
    plan: IterationRow, back: IterationRow, until: float, since: float = 0.0
) -> tuple[int, float]:
    """The number of requests in a step, and the seconds around it in which the worker was idle."""
    return len(plan.entries), max(0.0, until - max(since, plan.at) - back.seconds)


_BY_THE_CLIENT = {Abort.CLIENT_GONE.value, Abort.EXPLICIT.value, Abort.SLOW_CLIENT.value}


def _ends_after(row: ArrivalRow, end: IterationRow | None) -> int | None:
    """Output tokens of a request that ended before its limit; None if it reached `max_tokens` or
    its deadline."""
    if end is None or end.reason == FinishReason.LENGTH.value:
        return None
    if end.reason == Abort.DEADLINE.value:
        return None
    return min(max(1, end.produced), row.max_tokens)


def _params(row: ArrivalRow) -> RequestSpec:
    return RequestSpec(
        prompt=(),
        max_tokens=row.max_tokens,
        sampling=GREEDY,
        end_ids=frozenset({END}),
        min_tokens=row.min_tokens,
        priority=row.priority,
        tenant=row.tenant,
        client=row.client,
        weight=row.weight,
        ttft_deadline=row.ttft_deadline,
        deadline=row.deadline,
        is_background=row.is_background,
        itl_goal=row.itl_goal,
        pooling=PoolSpec() if row.is_pooling else None,
        caching=Caching(seconds=row.retention),
    )


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope of a least-squares line; neither is negative."""
    if not points:
        return 0.0, 0.0
    count = len(points)
    x, y = sum(p[0] for p in points) / count, sum(p[1] for p in points) / count
    spread = sum((p[0] - x) ** 2 for p in points)
    slope = sum((p[0] - x) * (p[1] - y) for p in points) / spread if spread else 0.0
    slope = min(max(0.0, slope), y / x)
    return y - slope * x, slope


_arrivals = msgspec.json.Decoder(ArrivalRow)
_rows = msgspec.json.Decoder(IterationRow)


def decode_row(line: str | bytes) -> IterationRow:
    """Decode one line of a recording. Raises `msgspec.MsgspecError`."""
    text = line.encode() if isinstance(line, str) else line
    if b'"arrived":' not in text:
        return _rows.decode(text)
    arrival = _arrivals.decode(text)
    return IterationRow(arrival.at, arrival)


def read_recording(path: Path) -> Recording:
    """Read a recording, which may be gzipped. Raises `BadRecording`."""
    opener = gzip.open if path.suffix == ".gz" else open
    rows: list[IterationRow] = []
    try:
        with opener(path, "rb") as file:
            header = _header(path, file.readline())
            rows.extend(map(decode_row, file))
    except (OSError, EOFError) as error:
        raise BadRecording(f"cannot read the recording {path}: {error}", "replay") from error
    except msgspec.MsgspecError as error:
        raise BadRecording(f"{path}, line {len(rows) + 2}: {error}", "replay") from error
    if not any(row.arrived is not None for row in rows):
        raise BadRecording(f"the recording {path} contains no requests", "replay")
    first = next((row.arrived for row in rows if row.arrival and row.arrival.images), None)
    if first is not None:
        raise BadRecording(
            f"request {first} of the recording {path} has images, which cannot be replayed: a "
            "recording does not have the steps and the time of their encoder",
            "replay",
        )
    return Recording(path, header, tuple(rows))


def _header(path: Path, line: bytes) -> RecordingHeader:
    try:
        row = msgspec.json.decode(line)
        version = row.get("podway_recording")
    except (msgspec.MsgspecError, AttributeError) as error:
        raise BadRecording(f"{path} is not a recording of podway serve", "replay") from error
    if version != VERSION:
        raise BadRecording(
            f"{path} is a recording of version {version}; this version of podway reads {VERSION}",
            "replay",
        )
    try:
        kv = {each.name: row[each.name] for each in fields(KVShape) if each.name in row}
        return msgspec.convert(row | {"kv": kv}, RecordingHeader)
    except (AssertionError, msgspec.MsgspecError) as error:
        raise BadRecording(f"{path}, line 1: {error}", "replay") from error
