import asyncio
from itertools import pairwise

import pytest

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import StepFailed
from engine.iteration import Iteration, Observer
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.loop import Engine
from engine.policy import build
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Abort, FinishReason, Request, RequestSpec, State
from engine.simulated.executor import SimulatedExecutor
from engine.simulated.virtual_loop import run_virtual
from engine.step import LAST_TOKEN, SamplingParams, StepResult
from tests.models.drafts import a_drafter
from tests.scheduling import GREEDY, HAND_COST, a_scheduler, a_spec, planned

END = 9


def commit(scheduler: IterationScheduler, iteration: Iteration, token: int = 5) -> list[int]:
    """Commit an iteration in which every sampled token is `token`; ids of requests that got one."""
    samples = sum(entry.sample is not None for entry in iteration.step.entries)
    result = StepResult(iteration.step.step_id, (token,) * samples, 0.01)
    found = [delivery.request.request_id for delivery in scheduler.commit(iteration, result, 0.0)]
    scheduler.ledger.check()
    scheduler.pool.check()
    return list(found)


def ahead(scheduler: IterationScheduler, oldest: Iteration) -> Iteration:
    return planned(scheduler, 0.0, oldest)


def two_in_flight(
    spec: RequestSpec, **bounds: object
) -> tuple[IterationScheduler, Request, Iteration, Iteration]:
    """A request with an iteration in flight, and a second one planned ahead."""
    scheduler = a_scheduler(FirstComeFirstServed(), **bounds)  # type: ignore[arg-type]
    request = scheduler.add(spec, 0.0)
    oldest = planned(scheduler)
    return scheduler, request, oldest, ahead(scheduler, oldest)


def test_nothing_is_planned_ahead_of_drafts() -> None:
    scheduler = IterationScheduler(
        SchedulerSettings(max_model_len=500, max_batch_size=2),
        KVLedger(KVShape(100, 1)),
        FirstComeFirstServed(),
        drafter=a_drafter([[5] * 20], error_rate=0.0),
    )
    scheduler.add(a_spec(3, 20), 0.0)
    commit(scheduler, planned(scheduler))
    oldest = planned(scheduler)
    assert oldest.step.has_drafts
    assert scheduler.plan(0.0, oldest) is None


def test_the_next_iteration_continues_from_the_last_token_on_the_worker() -> None:
    scheduler, request, oldest, second = two_in_flight(a_spec(3, 9))
    (entry,) = second.step.entries
    assert (entry.start, entry.tokens) == (3, (LAST_TOKEN,))
    assert entry.sample is not None
    assert scheduler.plan(0.0) is None
    assert scheduler.plan(0.0, oldest) is None
    assert commit(scheduler, oldest, 7) == [0]
    assert (request.state, request.output) == (State.RUNNING, [7])
    third = ahead(scheduler, second)
    assert commit(scheduler, second, 8) == [0]
    assert commit(scheduler, third, 6) == [0]
    assert (request.state, request.output) == (State.READY, [7, 8, 6])
    assert planned(scheduler).step.entries[0].tokens == (6,)


def test_a_long_prompt_is_planned_ahead_in_chunks_with_known_tokens() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    scheduler.add(RequestSpec(tuple(range(100, 120)), 2, GREEDY), 0.0)
    pieces = [planned(scheduler)]
    for _ in range(3):
        pieces.append(ahead(scheduler, pieces[-1]))
        commit(scheduler, pieces[-2])
    entries = [piece.step.entries[0] for piece in pieces]
    assert [(entry.start, len(entry.tokens)) for entry in entries] == [
        (0, 8),
        (8, 8),
        (16, 4),
        (20, 1),
    ]
    assert entries[1].tokens == tuple(range(108, 116))
    assert entries[3].tokens == (LAST_TOKEN,)
    assert [entry.sample is not None for entry in entries] == [False, False, True, True]


def test_nothing_is_planned_after_the_last_allowed_token() -> None:
    scheduler, request, oldest, second = two_in_flight(a_spec(3, 2))
    commit(scheduler, oldest)
    assert scheduler.plan(0.0, second) is None
    commit(scheduler, second)
    assert (request.state, request.finish) == (State.FINISHED, FinishReason.LENGTH)
    assert scheduler.ledger.num_held == 0


def test_a_surplus_token_is_dropped_and_its_slot_returns_with_its_iteration() -> None:
    scheduler, request, oldest, second = two_in_flight(a_spec(3, 9, end_ids=frozenset({END})))
    assert commit(scheduler, oldest, END) == [0]
    assert (request.state, request.finish) == (State.LEAVING, FinishReason.STOP)
    assert scheduler.ledger.num_held == 4
    scheduler.cancel(request, Abort.CLIENT_GONE, 0.0)
    assert scheduler.plan(0.0, second) is None
    assert commit(scheduler, second) == []
    assert (request.state, request.output) == (State.FINISHED, [END])
    assert scheduler.ledger.num_held == 0


class Freed(Observer):
    """Notes how many iterations returned between a cancel and the request's end."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def freed(self, request: Request, iterations: int) -> None:
        self.after.append(iterations)


def test_a_cancel_frees_when_the_second_iteration_returns() -> None:
    settings, freed = SchedulerSettings(max_model_len=500), Freed()
    ledger = KVLedger(KVShape(100, 1))
    scheduler = IterationScheduler(settings, ledger, FirstComeFirstServed(), freed)
    request = scheduler.add(a_spec(3, 9), 0.0)
    oldest = planned(scheduler)
    second = ahead(scheduler, oldest)
    scheduler.cancel(request, Abort.CLIENT_GONE, 0.0)
    assert commit(scheduler, oldest) == []
    assert (request.state, scheduler.ledger.num_held) == (State.LEAVING, 4)
    assert commit(scheduler, second) == []
    assert (request.state, scheduler.ledger.num_held) == (State.CANCELLED, 0)
    assert freed.after == [2]


def test_an_expired_request_frees_when_the_second_iteration_returns() -> None:
    scheduler, request, oldest, second = two_in_flight(a_spec(3, 9, deadline=1.0))
    assert scheduler.expire(1.0) == [request]
    commit(scheduler, oldest)
    commit(scheduler, second)
    assert (request.state, request.output) == (State.EXPIRED, [])


def test_a_finished_request_in_flight_does_not_expire() -> None:
    scheduler, request, oldest, second = two_in_flight(
        a_spec(3, 9, deadline=1.0, end_ids=frozenset({END}))
    )
    commit(scheduler, oldest, END)
    assert scheduler.expire(1.0) == []
    commit(scheduler, second)
    assert (request.state, request.error) == (State.FINISHED, None)


def test_a_failed_iteration_also_fails_the_one_planned_ahead_of_it() -> None:
    scheduler, request, oldest, second = two_in_flight(a_spec(3, 9))
    assert scheduler.fail(oldest, StepFailed("boom"), 0.0) == [request]
    assert (request.state, str(request.error)) == (State.LEAVING, "boom")
    assert commit(scheduler, second) == []
    assert (request.state, scheduler.ledger.num_held) == (State.FAILED, 0)


def test_another_request_of_the_second_iteration_survives_the_failure_of_the_first() -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=2)
    scheduler.add(a_spec(3, 9), 0.0)
    oldest = planned(scheduler)
    mate = scheduler.add(a_spec(3, 9), 0.0)
    second = ahead(scheduler, oldest)
    scheduler.fail(oldest, StepFailed("boom"), 0.0)
    assert commit(scheduler, second) == [mate.request_id]
    assert mate.state is State.READY


def test_a_lost_device_counts_one_crash_per_request_and_ends_finished_ones() -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=2)
    done = scheduler.add(a_spec(3, 9, end_ids=frozenset({END})), 0.0)
    oldest = planned(scheduler)
    other = scheduler.add(a_spec(3, 9), 0.0)
    second = ahead(scheduler, oldest)
    commit(scheduler, oldest, END)
    third = ahead(scheduler, second)
    assert other in third.requests
    assert scheduler.lose_device([second, third], 0.0) == [done]
    assert (done.state, done.error) == (State.FINISHED, None)
    assert (other.state, other.num_crashes, other.unplanned) == (State.WAITING, 1, 3)
    assert scheduler.ledger.num_held == 0


def test_suspects_run_apart_with_two_iterations_in_flight() -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), max_batch_size=2)
    suspects = [scheduler.add(a_spec(3, 9), 0.0) for _ in range(2)]
    scheduler.lose_device([planned(scheduler)], 0.0)
    oldest = planned(scheduler)
    assert oldest.requests == (suspects[0],)
    assert scheduler.plan(0.0, oldest) is None
    commit(scheduler, oldest)
    assert planned(scheduler).requests == tuple(suspects)


def test_end_tokens_are_banned_as_long_as_the_pending_token_does_not_suffice() -> None:
    scheduler = a_scheduler(FirstComeFirstServed())
    scheduler.add(a_spec(3, 9, end_ids=frozenset({END}), min_tokens=2), 0.0)
    flights = [planned(scheduler)]
    for _ in range(2):
        flights.append(ahead(scheduler, flights[-1]))
        commit(scheduler, flights[-2])
    samples = [flight.step.entries[0].sample for flight in flights]
    assert [sample.banned for sample in samples if sample is not None] == [(END,), (END,), ()]


def test_only_the_first_step_carries_the_output_that_penalties_read() -> None:
    spec = RequestSpec((1, 2), 9, SamplingParams(presence_penalty=1.0))
    scheduler, _, oldest, second = two_in_flight(spec)
    commit(scheduler, oldest, 7)
    found = []
    for flight in (oldest, second, ahead(scheduler, second)):
        sample = flight.step.entries[0].sample
        assert sample is not None
        assert sample.reads_output
        found.append((sample.output, sample.continues))
    assert found == [((), False), ((), True), ((), True)]


def test_no_request_is_planned_ahead_while_another_lacks_slots() -> None:
    scheduler = a_scheduler(FirstComeFirstServed(), num_blocks=7, max_batch_size=2)
    old, young = scheduler.add(a_spec(3, 5), 0.0), scheduler.add(a_spec(2, 6), 0.0)
    oldest = planned(scheduler)
    second = ahead(scheduler, oldest)
    assert second.requests == (old, young)  # four slots and three: all there are
    commit(scheduler, oldest)
    assert scheduler.plan(0.0, second) is None
    commit(scheduler, second)
    assert planned(scheduler).requests == (old,)
    assert (young.state, young.setbacks.num_preemptions) == (State.WAITING, 1)


def test_with_preemption_requests_in_flight_return_so_that_a_waiting_one_can_start() -> None:
    scheduler = a_scheduler(build("priority", HAND_COST), num_blocks=10, max_batch_size=4)
    long = scheduler.add(a_spec(8, 3, priority=1), 0.0)
    oldest = planned(scheduler)
    short = scheduler.add(a_spec(2, 2), 0.0)
    assert scheduler.plan(0.0, oldest) is None
    commit(scheduler, oldest)
    assert planned(scheduler).requests == (short,)
    assert (long.state, long.produced) == (State.WAITING, 1)


@pytest.mark.parametrize("stages", [1, 2])
def test_lookahead_changes_no_time_and_no_token_if_no_token_is_dropped(stages: int) -> None:
    def play(lookahead: int) -> list[tuple[float, list[int]]]:
        async def main() -> list[tuple[float, list[int]]]:
            clock = asyncio.get_running_loop().time
            settings = SchedulerSettings(
                max_model_len=500, max_batch_size=2, max_batch_tokens=8, reuses_prefixes=False
            )
            scheduler = IterationScheduler(
                settings, KVLedger(KVShape(99, 1)), FirstComeFirstServed()
            )
            executor = SimulatedExecutor(HAND_COST, depth=stages, lookahead=lookahead)
            engine = Engine(scheduler, executor, clock, lookahead=lookahead)
            running = asyncio.create_task(engine.run())

            async def one(prompt_len: int) -> tuple[float, list[int]]:
                tokens: list[int] = []
                with engine.stream(a_spec(prompt_len, 6)) as stream:
                    while stream.request.finish is None:
                        tokens += (await stream.next()).tokens
                return clock(), tokens

            found = await asyncio.gather(*(one(2) for _ in range(2 * stages)))
            running.cancel()
            assert not scheduler.pool
            assert scheduler.ledger.num_held == 0
            return found

        return run_virtual(main())

    assert play(1) == play(0)


def test_a_single_request_uses_only_one_iteration_ahead() -> None:
    """With two stages and one iteration of lookahead, one request is in two iterations."""

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        settings = SchedulerSettings(max_model_len=500, max_batch_size=2, max_batch_tokens=8)
        scheduler = IterationScheduler(settings, KVLedger(KVShape(99, 1)), FirstComeFirstServed())
        engine = Engine(scheduler, SimulatedExecutor(HAND_COST, 2, lookahead=1), clock, lookahead=1)
        running = asyncio.create_task(engine.run())
        instants = []
        with engine.stream(a_spec(1, 5)) as stream:
            while stream.request.finish is None:
                await stream.next()
                instants.append(clock())
                assert stream.request.num_in_flight <= 2
        assert [b - a for a, b in pairwise(instants)] == [1.0] * 4
        running.cancel()

    run_virtual(main())


def test_an_engine_keeps_at_most_depth_iterations_in_flight() -> None:
    async def main() -> int:
        clock = asyncio.get_running_loop().time
        settings = SchedulerSettings(max_model_len=500, max_batch_size=1, max_batch_tokens=8)
        scheduler = IterationScheduler(settings, KVLedger(KVShape(99, 1)), FirstComeFirstServed())
        engine = Engine(scheduler, SimulatedExecutor(HAND_COST, 2), clock, depth=1)
        running = asyncio.create_task(engine.run())
        most = 0
        with engine.stream(a_spec(1, 5)) as one, engine.stream(a_spec(1, 5)) as other:
            while one.request.finish is None or other.request.finish is None:
                await (one if one.request.finish is None else other).next()
                most = max(most, one.request.num_in_flight + other.request.num_in_flight)
        running.cancel()
        return most

    assert run_virtual(main()) == 1
