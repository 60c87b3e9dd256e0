"""StepTime: how many prompt tokens, and how many requests, an iteration has time for.

An ITL goal is a number of seconds that an iteration with decodes should not exceed, since each of
its decodes gets its next token when it ends. The cost model predicts the time of the decodes, of
their attention over the context and of the loop between two steps; prompts get the rest. So a
prompt's pieces are long beside few decodes and short beside many. And a request starts only if
the step would still meet the goal with one more decode: above the server's capacity requests wait
in the queue instead of making every running one slow.

The bound is the goal divided by the model's recent error (`LiveCost.margin`), because half of the
steps that fill a bound exactly take longer than predicted.

Without a goal, prompts make an iteration with decodes longer by at most a factor
(`max_prefill_slowdown`), and no request waits for that reason. One long prompt would otherwise slow
all streams down to one token per `max_batch_tokens` tokens of the prompt. The price is paid by the
prompt: with a factor F it gets (F - 1) / F of the time while other requests decode. If many more
requests have a prompt to compute than decode, the factor is larger: each of them counts as
`PROMPT_SHARE` of a decode. So when many requests arrive at once, the first one that decodes does
not keep the others waiting for half of the time. And prompts that need more than (F - 1) / F of the
time would wait longer and longer, although the machine can serve them: so the factor grows with the
age of the oldest prompt being computed, up to `MAX_GROWTH` times F. It begins to grow when the
prompt is `PATIENCE` times as old as its computation alone would take, but not beside a slice of an
image's encoder. Where a client has several requests beside those of others, its prompts age from
their start: its own queue makes nobody else's streams slower. The growth is scaled by the share of
seats that do not decode: where decodes have nearly all seats, more prompts find no seat. The
streams of a client that is alone wait only for its own prompts: the bound is doubled up to
`READING_SECONDS`.

The factor is relative to iterations of decodes only that were measured (`LiveCost.decodes`): while
a long prompt is computed there are none, and the model may ascribe some of its time to the decodes.

No starvation. The first prompt of an iteration gets a piece that adds `MIN_SHARE` of the goal
even if the decodes alone take all of it, so a prompt that takes P seconds alone is computed within
P / (MIN_SHARE * goal) iterations, however many decodes run. (A prompt's last token alone counts
as a decode.) A share of time and not a number of tokens: the excess over the goal stays below a
tenth on any machine, except where `MIN_PIECE` tokens take more. (Without a goal `MIN_FIRST_PIECE`
tokens: far behind the start of a prompt 16 tokens can take longer than all decodes, because each of
them reads the whole context.) Where any piece has a price of its own (on a GPU an iteration with
one may run without a CUDA graph, which can take longer than the bound), the first piece also gets
that price and as much time again, so that its tokens take at least as long as its price. So it is
with the rows to which a CUDA graph pads the iteration (`CostModel.graphs`): tokens that take their
place cost attention only, and a piece gets as many as fit. And one
request may always start, also if no step can meet the goal: the bound for starting is at least
`MIN_BATCH_SECONDS` times a decode alone.
"""

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from engine.control.batch_builder import BatchBuilder
from engine.control.settings import SchedulerSettings
from engine.cost.live import LiveCost
from engine.pool import RequestPool
from engine.request import Request, State

READY, WAITING = State.READY, State.WAITING  # bound once (see engine.pool)
# What any piece costs, so often: added to the time of `MIN_SHARE` (results/least_piece, "times")
PIECE_TIMES = 2.0
# Swept in results/constants
MIN_PIECE = 16  # tokens of a prompt's piece; less is not worth a row of the step
MIN_FIRST_PIECE = 4  # tokens of the first prompt's piece without a goal, which it gets in any case
MIN_SHARE = 0.1  # the first prompt of an iteration gets this share of the goal in any case
PROMPT_SHARE = 0.25  # each prompt counts as this share of a decode, if the factor allows less
PATIENCE = 2.0  # a prompt's age, in times that it takes alone, from which the factor grows
READING_SECONDS = 0.1  # fixed: between two tokens, twice as fast as people read
MAX_GROWTH = 2.0  # multiplies the factor at most, if no seat decodes
MIN_BATCH_SECONDS = 1.5  # lone decodes: a goal below that time keeps no request waiting


class _Decodes(NamedTuple):
    """The decodes of an iteration: their number, the slots they read, and the lowest goal."""

    num_rows: int
    slots: int
    goal: float


class _Prompts(NamedTuple):
    """The prompts that have a seat: their number, and what their ages multiply the factor by."""

    num_requests: int
    growth: float


class StepTime:
    """The time of the iteration being planned, against the ITL goals of its requests."""

    def __init__(self, settings: SchedulerSettings, pool: RequestPool, cost: LiveCost) -> None:
        self._goal = settings.itl_goal
        self._slowdown = settings.max_prefill_slowdown
        self._seats = settings.max_batch_size
        self._pool = pool
        self._cost = cost
        self._now = self._slice_seconds = 0.0
        self._started: _Decodes | None = None  # all started requests, as if all were decodes
        self._prompts: _Prompts | None = None
        self.has_goals = self._goal < inf
        self.bounds_pieces = self.has_goals or self._slowdown < inf

    def watch(self, request: Request) -> None:
        """A request arrives; the first one with a goal of its own turns the planning on."""
        if request.spec.itl_goal is not None:
            self.has_goals = self.bounds_pieces = True

    def begin_plan(self, now: float, slice_seconds: float) -> None:
        """Forget what was computed for the last plan. The encoder takes `slice_seconds`."""
        self._slice_seconds = slice_seconds
        self._now, self._started, self._prompts = now, None, None

    def goal_of(self, request: Request) -> float:
        """Seconds: its own goal, else the server's; infinite for a background request."""
        if request.spec.is_background:
            return inf
        own = request.spec.itl_goal
        return self._goal if own is None else own

    def goal(self, batch: BatchBuilder) -> float:
        """The lowest goal of the decodes in the batch; infinite if there is none."""
        if not self.has_goals:
            return inf
        return min([self.goal_of(request) for request, _ in batch.decodes], default=inf)

    def piece(self, batch: BatchBuilder, request: Request, num_tokens: int) -> int:
        """How many of a prompt's next `num_tokens` tokens the iteration has time for."""
        decodes = self._decodes(batch)
        goal = self._bound(decodes, self._growth(request))
        if goal == inf:
            return num_tokens
        if decodes.goal == inf and self._is_among_own(request):
            goal = max(goal, min(2.0 * goal, READING_SECONDS))
        model, start = self._cost.model, request.num_planned
        beside = decodes.num_rows + sum(len(entry.tokens) for _, entry in batch.prefills)
        taken = self._besides_tokens(decodes, batch) + self._slice_seconds
        draws = request.wants_prompt_logprobs
        in_time = model.tokens_within(goal - taken, num_tokens, start, beside, draws=draws)
        fewest = MIN_PIECE
        if all(len(entry.tokens) == 1 for _, entry in batch.prefills):  # it is the first prompt
            fewest = MIN_PIECE if decodes.goal < inf else MIN_FIRST_PIECE
            share = MIN_SHARE * (decodes.goal if decodes.goal < inf else goal)
            computed = model.padded(beside + 1) if model.graphs else beside
            seconds = model.tokens(computed) + share + PIECE_TIMES * model.per_piece
            least = model.tokens_within(seconds, num_tokens, start, beside, draws=draws)
            in_time = max(in_time, least, fewest)
        return min(num_tokens, in_time) if in_time >= min(fewest, num_tokens) else 0

    def _is_among_own(self, request: Request) -> bool:
        """Whether all requests are of one client that is known, and nothing is done for images."""
        has_images = bool(self._slice_seconds) or request.times.lacked_image_at is not None
        is_alone = bool(request.spec.client) and len(self._pool.clients) == 1
        return is_alone and not has_images

    def left(self, batch: BatchBuilder) -> float:
        """The seconds that the decodes of a complete batch leave for other work; infinite without
        decodes, or without a goal for them."""
        if not self.bounds_pieces or not batch.decodes:
            return inf
        decodes = self._decodes(batch)
        goal = self._bound(decodes)
        pieces = sum(len(entry.tokens) for _, entry in batch.prefills)
        model, count = self._cost.model, decodes.num_rows + pieces
        tokens = model.tokens(model.padded(count) if pieces else count)
        return goal - self._besides_tokens(decodes, batch) - tokens

    def _bound(self, decodes: _Decodes, growth: float = 1.0) -> float:
        """Seconds that an iteration with these decodes may take, with a prompt whose age has this
        growth; infinite without decodes."""
        if decodes.goal < inf:
            return decodes.goal / self._cost.margin
        if not decodes.num_rows or self._slowdown == inf:
            return inf
        if self._prompts is None:
            self._prompts = self._all_prompts()
        count, oldest = self._prompts
        factor = self._slowdown
        if not self._slice_seconds:
            free = 1.0 - decodes.num_rows / self._seats
            factor *= 1.0 + free * (max(growth, oldest) - 1.0)
        factor = max(factor, 1.0 + PROMPT_SHARE * count / decodes.num_rows)
        idle = self._cost.model.idle(decodes.num_rows)
        return factor * (self._cost.decodes(decodes.num_rows, decodes.slots) + idle)

    def _all_prompts(self) -> _Prompts:
        pool = self._pool
        started = [r for r in pool.started if r.unplanned > 1 and not r.spec.is_background]
        waiting = pool.count(WAITING) - pool.background.num_waiting
        count = len(started) + max(0, min(waiting, self._seats - pool.num_admitted))
        return _Prompts(count, max(map(self._growth, started), default=1.0))

    def _growth(self, request: Request) -> float:
        """What the age of a prompt multiplies the factor by, before it is scaled. The time in which
        its images were encoded does not count, nor its wait among several prompts of a client."""
        model, length = self._cost.model, len(request.spec.prompt)
        alone = model.tokens(length) + model.attention(length, 0)
        times, clients = request.times, self._pool.clients
        since = times.arrived_at if times.lacked_image_at is None else times.lacked_image_at
        if times.admitted_at is not None and len(clients) > 1 and clients[request.spec.client] > 1:
            since = max(since, times.admitted_at)
        growth = (self._now - since) / (PATIENCE * alone) if alone else 1.0
        return max(1.0, min(MAX_GROWTH, growth))

    def may_start(self, request: Request) -> bool:
        """Whether the goals would be met with this request as one more decode."""
        if request.spec.is_background or not self.has_goals:
            return True
        started = self._all_started()
        goal = min(started.goal, self.goal_of(request))
        if not started.num_rows or goal == inf:
            return True
        lowest = MIN_BATCH_SECONDS * self._cost.model.compute(1, request.num_tokens)
        count, slots = started.num_rows + 1, started.slots + request.num_tokens
        return self._seconds(count, slots) <= max(goal / self._cost.margin, lowest)

    def started(self, request: Request) -> None:
        """The request has started in this plan."""
        if self._started is not None and not request.spec.is_background:
            count, slots, goal = self._started
            goal = min(goal, self.goal_of(request))
            self._started = _Decodes(count + 1, slots + request.num_tokens, goal)

    def _decodes(self, batch: BatchBuilder) -> _Decodes:
        """The decodes in the batch, and those that are not considered yet but have a seat."""
        planned = [request for request, _ in batch.decodes]
        left = [r for r in self._pool.started if r.state is READY and r.unplanned == 1]
        left += [r for r in batch.ahead if r.unplanned == 1]
        return self._sum([*planned, *left[: batch.seats - 1]])

    def _all_started(self) -> _Decodes:
        if self._started is None:
            self._started = self._sum(self._pool.started)
        return self._started

    def _sum(self, requests: Iterable[Request]) -> _Decodes:
        """These requests, without background requests, which get what time is left."""
        count, slots, goal = 0, 0, inf
        for request in requests:
            if not request.spec.is_background:
                count, slots = count + 1, slots + request.num_tokens
                goal = min(goal, self.goal_of(request))
        return _Decodes(count, slots, goal)

    def _seconds(self, count: int, slots: int) -> float:
        """Seconds of an iteration of `count` decodes that read `slots` slots, and of the loop."""
        model = self._cost.model
        rows = model.per_draw * count + model.per_slot * slots + model.idle(count)
        return model.tokens(count) + rows

    def _besides_tokens(self, decodes: _Decodes, batch: BatchBuilder) -> float:
        """Seconds of the decodes and of the pieces in the batch that do not depend on the number
        of tokens beside them: attention, logits, sampling and the loop; with the next piece's
        sampling."""
        model = self._cost.model
        pieces = 0.0
        for _, entry in batch.prefills:
            pieces += model.attention(len(entry.tokens), entry.start)
            if entry.prompt_logprobs is not None:
                pieces += model.per_draw * len(entry.prompt_logprobs.ids)
        count = decodes.num_rows + len(batch.prefills) + 1
        return self._seconds(count, decodes.slots) - model.tokens(count) + pieces
