from itertools import count

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import StepFailed, Unavailable
from engine.iteration import EVENTS, Observer, ObserverGroup
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Abort, Request
from engine.step import StepResult
from tests.scheduling import a_spec, planned


class Notes:
    """Writes down the name of every call."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> object:
        return lambda *_: self.seen.append(name)


class Ends(Observer):
    """Overrides one event only."""

    def __init__(self) -> None:
        self.num_ended = 0

    def ended(self, request: Request, now: float) -> None:
        self.num_ended += 1


def play(observer: Observer) -> None:
    """A schedule that causes every event."""
    settings = SchedulerSettings(64, max_batch_size=2, max_batch_tokens=8)
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(4, 4)), FirstComeFirstServed(), observer
    )
    now = map(float, count())
    requests = [scheduler.add(a_spec(4, 8), next(now)) for _ in range(4)]
    scheduler.hand_over(requests[3], scheduler, next(now))
    scheduler.cancel(requests[3], Abort.CLIENT_GONE, next(now))
    first = planned(scheduler, next(now))
    scheduler.plan(next(now))
    scheduler.commit(first, StepResult(first.step.step_id, (1, 1), 0.5), next(now))
    scheduler.switch(FirstComeFirstServed(), next(now))
    while not requests[1].setbacks.num_preemptions:
        iteration = planned(scheduler, next(now))
        tokens = (1,) * len(iteration.requests)
        scheduler.commit(iteration, StepResult(iteration.step.step_id, tokens, 0.5), next(now))
    failing = planned(scheduler, next(now))
    scheduler.fail(failing, StepFailed("boom"), next(now))
    scheduler.lose_device([], next(now))
    scheduler.fail_all(Unavailable("closed"), next(now))


def swap(observer: Observer) -> None:
    """Two requests, on a device with blocks for one and a host tier with blocks for the other."""
    settings = SchedulerSettings(64, max_batch_size=2, max_batch_tokens=8)
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(4, 4, 4)), FirstComeFirstServed(), observer
    )
    for _ in range(2):
        scheduler.add(a_spec(4, 8), 0.0)
    while scheduler.pool:
        iteration = planned(scheduler)
        tokens = (1,) * len(iteration.requests)
        scheduler.commit(iteration, StepResult(iteration.step.step_id, tokens, 0.5), 0.0)


def test_each_observer_of_a_group_gets_every_event() -> None:
    one, other = Notes(), Notes()
    group = ObserverGroup(one, other)  # type: ignore[arg-type]
    play(group)
    swap(group)
    assert one.seen == other.seen
    assert set(one.seen) == set(EVENTS)


def test_a_group_in_a_group_gets_the_events_that_its_observers_override() -> None:
    ends, notes = Ends(), Notes()
    group = ObserverGroup(ObserverGroup(ends), ObserverGroup(), notes)  # type: ignore[arg-type]
    play(group)
    assert ends.num_ended == notes.seen.count("ended") == 4
    assert set(vars(ObserverGroup(ends))) == {"ended"}
