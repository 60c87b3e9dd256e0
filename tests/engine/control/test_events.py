"""Which events observers get, and that each observer of a group gets them all."""

from itertools import count

from engine.control.scheduler import IterationScheduler
from engine.control.settings import SchedulerSettings
from engine.errors import StepFailed, Unavailable
from engine.events import NullObserver, Observer, ObserverGroup
from engine.kv.ledger import KVLedger
from engine.kv_shape import KVShape
from engine.policy.fcfs import FirstComeFirstServed
from engine.request import Abort
from engine.step import StepResult
from tests.scheduling import a_spec


class Notes:
    """Writes down the name of every call."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> object:
        return lambda *_: self.seen.append(name)


CALLS = sorted(name for name in vars(Observer) if not name.startswith("_"))


def test_a_null_observer_and_an_observer_group_accept_every_event() -> None:
    assert sorted(name for name in vars(NullObserver) if not name.startswith("_")) == CALLS
    assert sorted(name for name in vars(ObserverGroup) if not name.startswith("_")) == CALLS


def play(observer: Observer) -> None:
    """A schedule that causes every event."""
    settings = SchedulerSettings(64, max_batch_size=2, max_batch_tokens=8)
    scheduler = IterationScheduler(
        settings, KVLedger(KVShape(4, 4)), FirstComeFirstServed(), observer
    )
    now = map(float, count())
    requests = [scheduler.add(a_spec(4, 8), next(now)) for _ in range(4)]
    scheduler.cancel(requests[3], Abort.CLIENT_GONE, next(now))
    first = scheduler.plan(next(now))
    assert first is not None
    scheduler.plan(next(now))
    scheduler.commit(first, StepResult(first.step.step_id, (1, 1), 0.5), next(now))
    scheduler.switch(FirstComeFirstServed(), next(now))
    while not requests[1].num_preemptions:
        iteration = scheduler.plan(next(now))
        assert iteration is not None
        tokens = (1,) * len(iteration.requests)
        scheduler.commit(iteration, StepResult(iteration.step.step_id, tokens, 0.5), next(now))
    failing = scheduler.plan(next(now))
    assert failing is not None
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
        iteration = scheduler.plan(0.0)
        assert iteration is not None
        tokens = (1,) * len(iteration.requests)
        scheduler.commit(iteration, StepResult(iteration.step.step_id, tokens, 0.5), 0.0)


def test_each_observer_of_a_group_gets_every_event() -> None:
    one, other = Notes(), Notes()
    group = ObserverGroup(one, other)  # type: ignore[arg-type]
    play(group)
    swap(group)
    assert one.seen == other.seen
    assert set(one.seen) == set(CALLS)
