"""Prepares each step while the previous step is computed.

The first stage does so in the thread that receives steps. Later stages have a thread for it, where
preparing includes waiting for hidden states: it receives them while the stage still computes, so
the thread that receives steps never waits for them.
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
    """`put` and `take` may be called from two threads; steps are taken in the order of `put`.

    The preparing thread starts with the first step and ends with the process.
    """

    def __init__(self, prepare: Callable[[Step], T]) -> None:
        self._prepare = prepare
        self._received: SimpleQueue[Step] = SimpleQueue()
        self._ready: SimpleQueue[_Ready[T]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, step: Step) -> None:
        """Prepare the step; it will be run after the steps put before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="podway-inbox", daemon=True)
            self._thread.start()
        self._received.put(step)

    def prepare(self, step: Step) -> None:
        """Prepare the step in this thread; used instead of `put`, where nothing is waited for."""
        self._ready.put(self._prepared(step))

    @property
    def has_next(self) -> bool:
        """Whether a step is ready to be taken."""
        return not self._ready.empty()

    def take(self, step: Step) -> T:
        """The prepared step; raises the error of preparing it. A step that was not put is prepared
        now."""
        if self._thread is None and self._ready.empty():
            return self._prepare(step)
        ready = self._ready.get()
        assert ready.step_id == step.step_id, "steps are run in the order in which they came"
        if isinstance(ready.prepared, Exception):
            raise ready.prepared
        return ready.prepared

    def _run(self) -> None:
        while True:
            self._ready.put(self._prepared(self._received.get()))

    def _prepared(self, step: Step) -> _Ready[T]:
        try:
            return _Ready(step.step_id, self._prepare(step))
        except Exception as error:  # raised by `take` in the other thread
            return _Ready(step.step_id, error)
