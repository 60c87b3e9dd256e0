"""StepResults: applies the result of an iteration to its requests, row by row.

Most rows are plain: a chunk of a prompt, or tokens after which one token was sampled. Each other
kind of row has a commit of its own here: with drafts, pooled, late, with a fault, or computed from
KV that could not be read. A row of a request whose end is already decided is dropped.
"""

from collections.abc import Callable, Iterable
from functools import partial

from engine.control.lifecycle import Lifecycle
from engine.errors import EngineError, NoAllowedToken, RowFailed
from engine.iteration import Delivery, EntryResults, Iteration, SampledToken
from engine.kv.cache import KVCache
from engine.pool import RequestPool
from engine.request import FinishReason, Move, Request, State
from engine.speculation.drafter import Drafter
from engine.step import Fault, StepEntry, StepResult

RowCommit = Callable[[Request, StepEntry], Iterable[Delivery]]

LEAVING, READY, COMMIT = State.LEAVING, State.READY, Move.COMMIT  # bound once (see engine.pool)


class StepResults:
    """Counts the computed tokens of each request, adds those that were sampled, and ends the
    requests for which they are the last."""

    def __init__(
        self, kv: KVCache, pool: RequestPool, lifecycle: Lifecycle, drafter: Drafter | None
    ) -> None:
        self._kv = kv
        self._pool = pool
        self._lifecycle = lifecycle
        self._drafter = drafter
        self._block_size = kv.block_size
        self._keeps_all = kv.keeps_all
        # Of the iteration being committed:
        self._seconds = 0.0
        self._now = 0.0
        self._ran = pool.policy.ran

    def apply(self, iteration: Iteration, result: StepResult, now: float) -> list[Delivery]:
        """Apply a result; returns the tokens of requests whose end was not decided before. A
        request that fails, or finishes with a vector, is returned without a token."""
        self._seconds, self._now, self._ran = result.seconds, now, self._pool.policy.ran
        unread = self._finish_moves(iteration, result)
        if result.prompt_logprobs:
            for request, of_prompt in zip(iteration.requests, result.prompt_logprobs, strict=True):
                if request not in unread:  # its row is computed again
                    request.prompt_logprobs += of_prompt
        results = iteration.results(result)
        special = self._special_rows(iteration, result, results, unread)
        deliveries: list[Delivery] = []
        advance, settle = self._advance, self._settle
        new = tuple.__new__  # in place of Delivery(…), which takes twice as long
        entries, tokens, logprobs = iteration.step.entries, results.tokens, results.logprobs
        rows = zip(entries, iteration.requests, tokens, logprobs, strict=True)
        for entry, request, token, scores in rows:
            request.num_in_flight -= 1
            if request.state is LEAVING:
                if request not in special:
                    self._keep(request, entry)
                self._lifecycle.iteration_returned(request, now)
            elif special and request in special:
                deliveries += special[request](request, entry)
            else:
                num_tokens = len(entry.tokens)
                advance(request, entry.start, num_tokens, token)
                settle(request, entry.start, num_tokens)
                if token is not None:
                    deliveries.append(new(Delivery, (request, token, scores)))
        return deliveries

    def _finish_moves(self, iteration: Iteration, result: StepResult) -> Iterable[Request]:
        """The moves of the step have ended. Returns the requests whose KV could not be read."""
        if not iteration.step.moves:
            return ()
        finished = self._kv.finish(iteration, result)
        for leaving in finished.leaving:
            self._lifecycle.iteration_returned(leaving, self._now)
        return finished.unread

    def _special_rows(
        self,
        iteration: Iteration,
        result: StepResult,
        results: EntryResults,
        unread: Iterable[Request],
    ) -> dict[Request, RowCommit]:
        """The requests whose rows are not plain, with what commits them. A fault comes before
        other results, and KV that could not be read before a fault."""
        rows: dict[Request, RowCommit] = {}
        for request, tokens in results.drafted.items():
            rows[request] = partial(self._commit_drafts, tokens)
        for request, vector in results.vectors.items():
            rows[request] = partial(self._commit_vector, vector)
        for number in result.late:
            rows[iteration.requests[number]] = self._commit_late
        for fault in result.faults:
            rows[iteration.requests[fault.entry]] = partial(self._commit_fault, fault)
        for request in unread:
            rows[request] = self._commit_unread
        return rows

    def _keep(self, request: Request, entry: StepEntry) -> None:
        """Leave what was computed for a request that ends in the cache, for a retry. Tokens that
        were sampled meanwhile are unknown, and so are those behind a row that had no result."""
        stop = entry.start + len(entry.tokens)
        if entry.start == request.num_computed and stop <= request.num_tokens:
            request.num_computed = stop
            self._kv.publish(request, entry.start)

    # What all rows with a result have in common

    def _advance(self, request: Request, start: int, num_tokens: int, token: int | None) -> None:
        """The KV of `num_tokens` tokens was computed, and `token` was sampled after them."""
        request.num_computed = start + num_tokens
        self._ran(request, num_tokens, self._seconds, self._now)
        if token is None:
            return
        request.num_pending -= 1
        if request.num_crashes:
            self._lifecycle.clear(request)
        times = request.times
        if times.last_token_at != self._now:
            times.earlier_token_at, times.last_token_at = times.last_token_at, self._now
        if times.first_token_at is None:
            times.first_token_at = self._now
        request.append(token)

    def _settle(self, request: Request, start: int, num_tokens: int) -> None:
        """The request is ready for the next iteration, or ends."""
        if request.num_computed % self._block_size < num_tokens or not self._keeps_all:
            self._kv.publish(request, start)  # a block is full
        if request.finish is not None:
            self._lifecycle.leave(request, self._now)
        elif not request.num_in_flight:
            self._pool.move(request, COMMIT)

    # The kinds of rows

    def _commit_drafts(
        self, tokens: tuple[SampledToken, ...], request: Request, entry: StepEntry
    ) -> Iterable[Delivery]:
        """The request goes on behind its accepted drafts, up to a token that ends it."""
        assert not request.num_in_flight, "no iteration is planned behind drafts"
        first, *accepted = tokens
        request.num_planned = entry.start + len(tokens)
        self._verified(request, entry, len(accepted))
        self._advance(request, entry.start, len(tokens), first.token)
        deliveries = [Delivery(request, *first)]
        for sampled in accepted:
            if request.finish is None:
                request.append(sampled.token)
                deliveries.append(Delivery(request, *sampled))
        self._settle(request, entry.start, len(tokens))
        return deliveries

    def _verified(self, request: Request, entry: StepEntry, num_accepted: int) -> None:
        """So many of an entry's drafts were accepted."""
        if self._drafter is not None:
            self._drafter.returned(request, entry.num_drafts, num_accepted)

    def _commit_vector(
        self, vector: bytes, request: Request, entry: StepEntry
    ) -> Iterable[Delivery]:
        """The request has the vector that its prompt was pooled into, with which it ends."""
        num_tokens = len(entry.tokens)
        self._advance(request, entry.start, num_tokens, None)
        request.vector, request.finish = vector, FinishReason.STOP
        self._settle(request, entry.start, num_tokens)
        return (Delivery(request, None),)

    def _commit_late(self, request: Request, entry: StepEntry) -> Iterable[Delivery]:
        """The request got no token, and computes the last of its tokens again. A recurrent state
        has gone past that token: such a request waits, to start behind its newest snapshot."""
        num_tokens = len(entry.tokens) - entry.num_drafts
        if entry.num_drafts:
            self._verified(request, entry, 0)
        self._advance(request, entry.start, num_tokens, None)
        request.samples.was_late(request.produced)
        if self._kv.rewinds:
            request.reset_to(request.num_computed - 1)
        self._settle(request, entry.start, num_tokens)
        if not self._kv.rewinds and request.state is READY:
            self._kv.forget(request)
        return ()

    def _commit_fault(self, fault: Fault, request: Request, entry: StepEntry) -> Iterable[Delivery]:
        """The request fails."""
        self._lifecycle.fail(request, _error_of(fault), self._now)
        return (Delivery(request, None),)

    def _commit_unread(self, request: Request, entry: StepEntry) -> Iterable[Delivery]:
        """The row was computed from KV that could not be read: the request waits again."""
        self._kv.forget(request)
        return ()


def _error_of(fault: Fault) -> EngineError:
    return NoAllowedToken(fault.message) if fault.is_caller_error else RowFailed(fault.message)
