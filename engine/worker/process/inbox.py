"""Steps are prepared in a thread of their own, while the one before is computed.

On a later stage preparing is the wait for hidden states: with this thread they are received while
the stage still computes, and the thread that learns of steps never waits for them.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from engine.step import Step, StepId

T = TypeVar("T")


class _Ready(NamedTuple, Generic[T]):
    step_id: StepId
    prepared: T | Exception


class Inbox(Generic[T]):
    """`put` and `take` may be called from two threads; each step is taken in the order of `put`.

    The thread starts with the first step and ends with the process.
    """

    def __init__(self, prepare: Callable[[Step], T]) -> None:
        self._prepare = prepare
        self._learned: SimpleQueue[Step] = SimpleQueue()
        self._ready: SimpleQueue[_Ready[T]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, step: Step) -> None:
        """The step will be run after those put before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="podway-inbox", daemon=True)
            self._thread.start()
        self._learned.put(step)

    def take(self, step: Step) -> T:
        """What was made of a step, or what making it raised; a step never put is made now."""
        if self._thread is None:
            return self._prepare(step)
        ready = self._ready.get()
        assert ready.step_id == step.step_id, "steps are run in the order in which they came"
        if isinstance(ready.prepared, Exception):
            raise ready.prepared
        return ready.prepared

    def _run(self) -> None:
        while True:
            step = self._learned.get()
            try:
                prepared: T | Exception = self._prepare(step)
            except Exception as error:  # the doorway of this thread: it is raised in the other
                prepared = error
            self._ready.put(_Ready(step.step_id, prepared))
