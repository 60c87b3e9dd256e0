"""DecodeLeap: many iterations of the same decodes, computed in one go.

Between two arrivals, ends or preemptions the scheduler plans the same iteration again and again:
every started request decodes one token. Such iterations differ in nothing but the positions, so
their times are known in advance (`CostModel` is linear in the slots that decodes read) and their
results are committed together. All figures are equal, bit for bit, to those of single steps.

A leap is possible if every started request decodes and has a seat, and no waiting request can
start. With requests waiting that holds only while a plan would try the same ones in vain: with no
block or seat becoming free. It ends with the first request that finishes, and
before blocks run short. Other policies than FCFS may change their order in every iteration, so
they have no leaps: under load hardly any iteration is like the one before.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

from engine.control.scheduler import IterationScheduler
from engine.policy.base import BackgroundLast
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import FinishReason, Move, Request, State
from engine.simulated.executor import KnownCost
from engine.simulated.record import Recorder
from engine.simulated.replay import RecordedOutputs

WAITING, READY = State.WAITING, State.READY  # bound once (see engine.pool)
MAX_STEPS = 256  # steps of a leap; an arrival makes those computed beyond it useless


class Leaps:
    """Makes leaps of one scheduler. `outputs` are the output tokens; None makes them all 0."""

    def __init__(
        self,
        scheduler: IterationScheduler,
        cost: KnownCost,
        recorder: Recorder,
        outputs: RecordedOutputs | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.cost = cost
        self.recorder = recorder
        self.outputs = outputs
        kv = scheduler.kv
        has_host_tier = kv.shape.num_host_blocks > 0  # KV may be swapped in any plan
        is_possible = kv.keeps_all and not has_host_tier and not kv.saves
        self._is_possible = is_possible and _is_fcfs(scheduler)
        self._goes_on_beside_waiting = scheduler.settings.itl_goal == float("inf")

    def begin(self, now: float, *, is_blocked: bool) -> "DecodeLeap | None":
        """The leap that begins with a plan at `now`; None if that plan has to be made.

        `is_blocked`: the last plan could start no waiting request, and no request has arrived or
        ended since.
        """
        pool, settings = self.scheduler.pool, self.scheduler.settings
        count = len(pool.started)
        most = min(settings.max_batch_size, settings.max_batch_tokens)
        if not self._is_possible or not 0 < count <= most:
            return None
        if pool.count(WAITING) and not (is_blocked and self._goes_on_beside_waiting):
            return None
        for request in pool.started:
            known = len(request.spec.prompt) + len(request.output)
            is_decode = request.num_computed == known - 1 and request.output
            if request.state is not READY or not is_decode:
                return None
        leap = DecodeLeap(self, now)
        return leap if leap.ends else None

    def num_left(self, request: Request) -> int:
        """Output tokens until the request ends."""
        left = request.spec.max_tokens - len(request.output)
        if self.outputs is not None:
            left = min(left, self.outputs.num_left(request))
        return left

    def tokens(self, request: Request, count: int) -> list[int]:
        """The next output tokens of the request."""
        return [0] * count if self.outputs is None else self.outputs.next_tokens(request, count)


def _is_fcfs(scheduler: IterationScheduler) -> bool:
    policy = scheduler.policy
    inner = policy.inner if isinstance(policy, BackgroundLast) else policy
    return isinstance(inner, FirstComeFirstServed)


class DecodeLeap:
    """Steps with the same decodes. `ends` has the time at which each one returns.

    Steps are planned when the previous one returns and committed by `commit`, in order, as time
    goes on. After an arrival the steps that are not planned yet are dropped (`stop`).
    """

    def __init__(self, leaps: Leaps, now: float) -> None:
        self._leaps = leaps
        self._scheduler = leaps.scheduler
        started = self._scheduler.pool.started
        self.batch = list(self._scheduler.policy.started_order(started, now))
        self.committed_at = now  # the last step's return, at which the next one is planned
        self._next = 0  # number of that step
        self._num_left = [leaps.num_left(request) for request in self.batch]
        self.is_disturbed = False  # whether a waiting request may start now, so steps were dropped
        self.ends: list[float] = []
        self.seconds: list[float] = []  # the seconds of each step
        self._compute(now, self._num_with_blocks(min(MAX_STEPS, *self._num_left)))
        self._last_tokens = [request.times.last_token_at or now for request in self.batch]

    def _compute(self, now: float, most: int) -> None:
        """The times of at most so many steps, up to the one at which the state is sampled."""
        model, count = self._leaps.cost.model, len(self.batch)
        tokens, draws, idle = model.tokens(count), model.per_draw * count, model.idle(count)
        slots = sum([request.num_computed for request in self.batch]) + count
        per_slot, sample_at = model.per_slot, self._leaps.recorder.next_sample
        for _ in range(most):
            seconds = tokens + per_slot * slots + draws
            now = now + seconds + idle
            self.seconds.append(seconds)
            self.ends.append(now)
            slots += count
            if now >= sample_at:
                return

    def _num_with_blocks(self, most: int) -> int:
        """How many steps can be made, at most `most`, before blocks run short."""
        ledger = self._scheduler.ledger
        size, free = ledger.block_size, ledger.num_free
        slots = [(ledger.holding(r.request_id).num_slots, r.num_computed) for r in self.batch]

        def needed(steps: int) -> int:
            return sum([-(-max(0, used + steps - held) // size) for held, used in slots])

        if needed(most) <= free:
            return most
        return bisect_right(range(most), free, key=needed) - 1

    @property
    def returns_at(self) -> float:
        """When the last step of the leap returns."""
        return self.ends[-1]

    @property
    def is_committed(self) -> bool:
        """Whether all steps were committed."""
        return self._next == len(self.ends)

    def stop(self, now: float) -> None:
        """A request arrives: keep only the steps that are planned before `now`."""
        at = self._next
        while at < len(self.ends) - 1 and self.ends[at] < now:
            at += 1
        del self.ends[at + 1 :], self.seconds[at + 1 :]

    def commit(self, until: float) -> list[Request]:
        """Commit the steps that return before `until`; the requests that end with the last one."""
        stop = self._next
        while stop < len(self.ends) and self.ends[stop] < until:
            stop += 1
        for steps in self._undisturbed(stop - self._next):
            if self._commit(steps):  # a waiting request can share a new block, so it may start
                self.is_disturbed = True
                del self.ends[self._next :], self.seconds[self._next :]
        ended = [r for r, left in zip(self.batch, self._num_left, strict=True) if not left]
        for request in ended:
            self._end(request)
        self._leaps.recorder.sample_if_due(self.committed_at)
        return ended

    def _undisturbed(self, count: int) -> Iterator[int]:
        """Split `count` steps behind those that publish a block which a waiting request, among
        those that a plan tries, may look for next."""
        scheduler = self._scheduler
        if not scheduler.pool.count(WAITING) or not scheduler.settings.reuses_prefixes:
            yield count
            return
        size, done = scheduler.ledger.block_size, 0
        depths = {request.found.num_matched for request in self._tried()}
        stops = {
            step
            for request in self.batch
            for step in range(size - request.num_computed % size, count + 1, size)
            if (request.num_computed + step) // size - 1 in depths
        }
        for step in sorted(stops | {count}):
            if self._next + step - done <= len(self.ends):
                yield step - done
                done = step

    def _tried(self) -> Iterator[Request]:
        """The waiting requests that a plan tries to start."""
        waiting = (r for r in self._scheduler.policy.order(self.committed_at) if r.state is WAITING)
        return islice(waiting, self._scheduler.settings.scan_limit)

    def _commit(self, count: int) -> bool:
        """Commit so many steps; returns whether a waiting request can share a block
        that was published."""
        if not count:
            return False
        first, last = self._next, self._next + count
        now = self.ends[last - 1]
        leaps = self._leaps
        starts = [request.num_computed for request in self.batch]
        self._report(first, last)
        for request in self.batch:
            request.output += leaps.tokens(request, count)
            request.num_computed += count
            request.num_planned = request.num_computed
            request.times.last_token_at = now
        is_found = self._update_blocks(starts, count)
        for seconds in self.seconds[first:last]:
            leaps.cost.observe_tokens(len(self.batch), seconds)
        self._next, self.committed_at = last, now
        self._num_left = [left - count for left in self._num_left]
        self._scheduler.lifecycle.num_committed += count
        return is_found

    def _report(self, first: int, last: int) -> None:
        """Report the times of these steps to the recorder."""
        recorder, count = self._leaps.recorder, len(self.batch)
        recorder.num_iterations += last - first
        before = self.committed_at
        for number in range(first, last):
            recorder.busy_seconds += self.seconds[number]
            now = self.ends[number]
            if number:
                recorder.add_gap(now - before, count)
            else:
                for at in self._last_tokens:
                    recorder.add_gap(now - at, 1)
            before = now
        recorder.produced(self.batch, before)

    def _update_blocks(self, starts: list[int], count: int) -> bool:
        """Reserve and publish the blocks of `count` steps in the order of single steps; returns
        whether a waiting request looks for one of the published blocks."""
        kv, size = self._scheduler.kv, self._scheduler.ledger.block_size
        is_found = False
        for step, is_publication, index in sorted(self._block_events(starts, count)):
            request, start = self.batch[index], starts[index]
            if not is_publication:
                reserved = kv.reserve(request, start + step)
                assert reserved, "a leap ends before blocks run short"
                continue
            request.num_computed = start + step
            kv.publish(request, start + step - 1)
            request.num_computed = start + count
            block_hash = request.block_hashes[(start + step) // size - 1]
            is_found = is_found or self._is_looked_for(block_hash)
        return is_found

    def _block_events(self, starts: list[int], count: int) -> list[tuple[int, bool, int]]:
        """For each block that is needed or filled in the next `count` steps: the number of the
        step, from 1, whether the block is filled and can be published, and whose it is."""
        ledger, publishes = self._scheduler.ledger, self._scheduler.settings.reuses_prefixes
        size = ledger.block_size
        events: list[tuple[int, bool, int]] = []
        for index, (request, start) in enumerate(zip(self.batch, starts, strict=True)):
            first = ledger.holding(request.request_id).num_slots - start + 1
            if first <= count:
                events += [(step, False, index) for step in range(first, count + 1, size)]
            first = size - start % size
            if publishes and first <= count:
                events += [(step, True, index) for step in range(first, count + 1, size)]
        return events

    def _is_looked_for(self, block_hash: bytes) -> bool:
        """Whether a waiting request that a plan tries can share this block next."""
        if not self._scheduler.pool.count(WAITING):
            return False
        return any(block_hash in r.block_hashes[r.found.num_matched :][:1] for r in self._tried())

    def _end(self, request: Request) -> None:
        """The request has its last token."""
        is_stopped = request.output[-1] in request.spec.end_ids
        request.finish = FinishReason.STOP if is_stopped else FinishReason.LENGTH
        self._scheduler.pool.move(request, Move.PLAN)
        self._scheduler.lifecycle.leave(request, self.committed_at)
