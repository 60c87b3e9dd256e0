import os
import socket
import time
from collections.abc import Callable

import pytest

from adapters.isolation.children import Children, Limits, Outcome


def outcome_of(work: Callable[[], bytes], limits: Limits, *files: int) -> Outcome:
    """That of a job which a process with these limits has got."""
    ours, theirs = socket.socketpair()
    children, outcomes = Children(limits), list[Outcome]()

    def receive() -> bool:
        if theirs.recv(1) == b"":
            return False
        children.fork(7, work, files=files)
        return True

    def answer(outcome: Outcome) -> None:
        outcomes.append(outcome)
        ours.close()

    with ours, theirs:
        ours.send(b"x")
        children.serve(theirs, receive, answer)
    [outcome] = outcomes
    return outcome


def policy() -> bytes:
    return b"idle" if os.sched_getscheduler(0) == os.SCHED_IDLE else b"usual"


@pytest.mark.parametrize(("idle_seconds", "expected"), [(0.0, b"usual"), (60.0, b"idle")])
def test_a_job_begins_on_idle_cores_if_its_limits_say_so(
    idle_seconds: float, expected: bytes
) -> None:
    assert outcome_of(policy, Limits(60.0, 1 << 30, idle_seconds)).output == expected


def test_a_job_that_finds_no_idle_core_begins_anew_beside_all_others() -> None:
    file = os.memfd_create("file")
    kept = os.dup(file)

    def work() -> bytes:
        os.write(file, policy())
        while policy() == b"idle":
            time.sleep(0.01)
        return b"done"

    outcome = outcome_of(work, Limits(60.0, 1 << 30, 0.2), file)
    assert (outcome.number, outcome.output, outcome.status) == (7, b"done", 0)
    assert not outcome.is_late
    assert os.pread(kept, 100, 0) == b"idleusual"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    os.close(kept)


def test_the_second_child_of_a_job_may_be_late_too() -> None:
    def work() -> bytes:
        while True:
            time.sleep(0.01)

    assert outcome_of(work, Limits(0.2, 1 << 30, 0.1)).is_late
