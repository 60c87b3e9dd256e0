import threading
from dataclasses import dataclass, field

import pytest

from engine.errors import StepFailed, WorkerLost
from engine.step import StepId, StepResult, StepTimes
from engine.transport.wire import (
    FrameReader,
    FromWorker,
    StepFailure,
    StepRan,
    TraceEvents,
    read_from_worker,
)
from engine.worker.launched import StepOutcome
from engine.worker.process.results import Failure, ReceivedStep, ResultSender
from tests.engine.transport.workers import CompletedStep
from tests.fakes import a_step

TIMES = StepTimes(None, 1.0, 2.0)
MASK_WAIT_SECONDS = 60.0


def collected(number: int) -> StepOutcome:
    return StepOutcome(StepResult(StepId(number), (number,), 0.5), TIMES)


@dataclass
class Late:
    """A step that comes back when it is let, with a result or an error."""

    outcome: StepOutcome | Exception
    returns: threading.Event = field(default_factory=threading.Event)
    may_wait: bool = True

    def collect(self) -> StepOutcome:
        assert self.returns.wait(MASK_WAIT_SECONDS)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


@dataclass
class Wire:
    """Keeps the messages that are sent, and the thread that sent them; a test can wait for them."""

    messages: list[FromWorker] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    news: threading.Condition = field(default_factory=threading.Condition)
    ends: list[Exception] = field(default_factory=list)

    def send(self, data: bytearray) -> None:
        with self.news:
            self.messages += map(read_from_worker, FrameReader().feed(data))
            self.threads.add(threading.current_thread().name)
            self.news.notify_all()

    def wait_for(self, count: int) -> None:
        with self.news:
            assert self.news.wait_for(lambda: len(self.messages) >= count, MASK_WAIT_SECONDS)


def answers_to(wire: Wire, *, answers: bool = True, traces: bool = False) -> ResultSender:
    return ResultSender(wire.send, wire.ends.append, answers=answers, traces=traces)


def order(number: int) -> ReceivedStep:
    return ReceivedStep(a_step(number, 1), 0.25)


def test_a_step_computed_at_launch_is_sent_at_once() -> None:
    wire = Wire()
    answers = answers_to(wire, traces=True)
    answers.put(order(1), CompletedStep(collected(1)))
    answers.put(order(2), Failure("it failed", TIMES))
    assert wire.messages == [
        StepRan(collected(1).result),
        TraceEvents(StepId(1), 0.25, TIMES),
        StepFailure(StepId(2), "it failed"),
        TraceEvents(StepId(2), 0.25, TIMES),
    ]
    assert wire.threads == {threading.current_thread().name}
    answers.finish()


def test_steps_in_flight_are_sent_in_order_while_others_are_launched() -> None:
    wire, first, third = Wire(), Late(collected(1)), Late(collected(3))
    answers = answers_to(wire)
    answers.put(order(1), first)
    answers.put(order(2), Failure("not launched", TIMES))
    answers.put(order(3), third)
    assert wire.messages == []
    first.returns.set()
    wire.wait_for(2)
    third.returns.set()
    answers.finish()
    assert wire.messages == [
        StepRan(collected(1).result),
        StepFailure(StepId(2), "not launched"),
        StepRan(collected(3).result),
    ]
    assert wire.threads == {"podway-answers"}


@pytest.mark.parametrize(
    ("error", "line"),
    [(StepFailed("the stage before"), "the stage before"), (ValueError("odd"), "ValueError: odd")],
)
def test_a_step_that_fails_in_flight_sends_its_own_failure(error: Exception, line: str) -> None:
    wire, first, second = Wire(), Late(error), Late(collected(2))
    answers = answers_to(wire)
    for number, late in enumerate((first, second), 1):
        late.returns.set()
        answers.put(order(number), late)
    answers.finish()
    assert wire.messages == [StepFailure(StepId(1), line), StepRan(collected(2).result)]


def test_after_a_lost_device_nothing_more_is_sent() -> None:
    wire = Wire()
    answers = answers_to(wire, traces=True)
    lost = Late(WorkerLost("the device is gone"))
    answers.put(order(1), lost)
    answers.put(order(2), CompletedStep(collected(2)))
    lost.returns.set()
    with pytest.raises(WorkerLost, match="the device is gone"):
        answers.finish()
    assert wire.messages == []
    assert [str(error) for error in wire.ends] == ["the device is gone"]


def test_a_worker_that_sends_no_results_still_sends_traces() -> None:
    wire = Wire()
    answers = answers_to(wire, answers=False, traces=True)
    answers.put(order(1), CompletedStep(collected(1)))
    answers.finish()
    assert wire.messages == [TraceEvents(StepId(1), 0.25, TIMES)]
