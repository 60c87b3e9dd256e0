import threading

import pytest

from engine.step import Step, StepId
from engine.worker.process.inbox import Inbox


def prepared_by(step: Step) -> str:
    if step.step_id == 3:
        raise ValueError("step 3 is wrong")
    return f"{step.step_id} in {threading.current_thread().name}"


def a_step(number: int) -> Step:
    return Step(StepId(number), ())


def test_a_step_is_prepared_where_it_is_received_or_when_it_is_taken() -> None:
    inbox, here = Inbox(prepared_by), threading.current_thread().name
    inbox.prepare(a_step(1))
    assert inbox.take(a_step(1)) == f"1 in {here}"
    assert inbox.take(a_step(2)) == f"2 in {here}"


def test_an_inbox_knows_whether_a_step_is_ready() -> None:
    inbox = Inbox(prepared_by)
    assert not inbox.has_next
    inbox.prepare(a_step(1))
    assert inbox.has_next
    inbox.take(a_step(1))
    assert not inbox.has_next


def test_a_step_that_was_put_is_prepared_in_the_thread_of_the_inbox() -> None:
    inbox = Inbox(prepared_by)
    inbox.put(a_step(1))
    inbox.put(a_step(2))
    assert [inbox.take(a_step(number)) for number in (1, 2)] == [
        "1 in podway-inbox",
        "2 in podway-inbox",
    ]


@pytest.mark.parametrize("is_put", [True, False])
def test_an_error_of_preparing_a_step_is_raised_when_it_is_taken(is_put: bool) -> None:
    inbox = Inbox(prepared_by)
    for number in (3, 4):
        (inbox.put if is_put else inbox.prepare)(a_step(number))
    with pytest.raises(ValueError, match="step 3 is wrong"):
        inbox.take(a_step(3))
    assert inbox.take(a_step(4)).startswith("4")
