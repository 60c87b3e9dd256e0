"""The doorway of a worker process: reads the settings, loads the worker, answers steps in order.

A thread of its own learns of steps as they come, so that a stage knows a step before its hidden
states arrive; where steps are answered late, another one does that. The process ends when told
goodbye, when its parent hangs up or dies, and on SIGTERM. A step that raises is answered with a
failure and the worker lives on, unless it raised `WorkerLost`. A load that raises is answered with
one readable line.
"""

import argparse
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import SimpleQueue
from typing import Protocol, Self, TypeAlias

from engine.errors import StartupError, WorkerLost
from engine.step import Step, StepTimes, WorkerReport, WorkerSettings
from engine.transport.wire import (
    FrameReader,
    LoadFailed,
    LoadProgress,
    LoadWorker,
    RunStep,
    ToWorker,
    WireError,
    WorkerLoaded,
    frame,
    read_to_worker,
)
from engine.worker.launched import Launched
from engine.worker.process.results import (
    Failure,
    ResultSender,
    StepOrder,
    describe,
    line_of,
    one_line,
)

logger = logging.getLogger("engine.worker")  # the module itself runs as __main__

RECEIVE_BYTES = 1 << 18
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15

Learned: TypeAlias = "SimpleQueue[StepOrder | Exception | None]"


class LoadableWorker(Protocol):
    """What the class named on the command line provides."""

    @classmethod
    def load(cls, settings: WorkerSettings, progress: Callable[[str, int, int], None]) -> Self: ...

    @property
    def report(self) -> WorkerReport: ...

    @property
    def times(self) -> StepTimes:
        """Of the step launched last."""
        ...

    def learn(self, step: Step) -> None:
        """Hear of a step, in another thread than the one that runs those before."""
        ...

    def launch(self, step: Step) -> Launched:
        """Begin with a step, which may be computed by then. What it raises is its failure."""
        ...

    def abandon(self, step: Step, line: str) -> None:
        """After `launch` raised: let nobody wait for the step."""
        ...


class Parent:
    """The loop process at the other end of a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader()
        self._payloads: deque[bytearray] = deque()
        self._room = memoryview(bytearray(RECEIVE_BYTES))

    def receive(self) -> ToWorker:
        """The next message, waited for. Raises `EOFError` when the parent has hung up."""
        while not self._payloads:
            num_bytes = self._connection.recv_into(self._room)
            if num_bytes == 0:
                raise EOFError
            self._payloads.extend(self._frames.feed(self._room[:num_bytes]))
        return read_to_worker(self._payloads.popleft())

    def send(self, data: bytearray) -> None:
        """Hand one frame over. Raises `ConnectionError` when the parent has hung up."""
        self._connection.sendall(data)

    def progress(self, what: str, done: int, total: int) -> None:
        self.send(frame(LoadProgress(what, done, total)))


def main() -> int:
    """Serve one parent until it says goodbye or is gone; returns the exit code."""
    parser = argparse.ArgumentParser(description="A worker process; the gateway starts it.")
    parser.add_argument("--socket", type=int, required=True, help="inherited file descriptor")
    parser.add_argument("--parent", type=int, required=True, help="process id")
    parser.add_argument("worker", help="the class to load, as module:Class")
    arguments = parser.parse_args()
    settle_in(arguments.parent)
    with socket.socket(fileno=arguments.socket) as connection:
        connection.set_inheritable(False)
        try:
            return serve(Parent(connection), arguments.worker)
        except (EOFError, ConnectionError):
            return 0
        except (WorkerLost, WireError) as error:
            logger.error("the worker gives up: %s", error)
            return 1


def settle_in(parent: int) -> None:
    """Make the process a good child: it leaves Ctrl-C to its parent and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends us even in the middle of a long step
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s worker[{os.getpid()}] %(levelname)s %(message)s",
    )
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        prctl(PR_SET_NAME, b"podway-worker")  # at most 15 bytes
    if os.getppid() != parent:  # it died before we could ask to be told
        sys.exit(0)


def serve(parent: Parent, worker_path: str, listener: int | None = None) -> int:
    """The conversation: settings, progress, report, then steps. Returns the exit code.

    `listener` goes into the settings' placement, if this process and not the parent opened it.

    Raises `EOFError` or `ConnectionError` when the parent is gone, `WorkerLost` when the worker
    says that it cannot go on.
    """
    opening = parent.receive()
    if not isinstance(opening, LoadWorker):
        raise WireError(f"{type(opening).__name__} came before the settings")
    settings = opening.settings
    if listener is not None:
        settings = replace(settings, placement=replace(settings.placement, listener=listener))
    try:
        worker = load(worker_path, settings, parent.progress)
        parent.send(frame(WorkerLoaded(worker.report)))
    except ConnectionError:
        raise
    except StartupError as refusal:
        parent.send(frame(LoadFailed(one_line(str(refusal)))))
        return 1
    except Exception as error:
        logger.exception("the worker could not load")
        parent.send(frame(LoadFailed(f"the worker could not load: {describe(error)}")))
        return 1
    gc.collect()
    gc.freeze()  # the model stays; later collections need not look at it
    learned: Learned = SimpleQueue()
    placement = settings.placement
    answers = ResultSender(
        parent.send, learned.put, answers=placement.returns_results, traces=settings.traces
    )
    for order in orders(parent, worker, learned):
        answers.put(order, launch(worker, order.step))
    answers.finish()
    return 0


def orders(parent: Parent, worker: LoadableWorker, learned: Learned) -> Iterator[StepOrder]:
    """Steps in order until goodbye, learned in a thread; raises what ended the conversation."""

    def listen() -> None:
        try:
            while isinstance(message := parent.receive(), RunStep):
                order = StepOrder(message.step, time.monotonic())
                worker.learn(order.step)
                learned.put(order)
            learned.put(None)
        except Exception as error:  # the doorway of this thread: it is raised in the other
            learned.put(error)

    threading.Thread(target=listen, name="podway-control", daemon=True).start()
    while (found := learned.get()) is not None:
        if isinstance(found, Exception):
            raise found
        yield found


def load(
    worker_path: str, settings: WorkerSettings, progress: Callable[[str, int, int], None]
) -> LoadableWorker:
    """The worker named "module:Class", loaded."""
    module, _, name = worker_path.partition(":")
    worker_class: type[LoadableWorker] = getattr(importlib.import_module(module), name)
    return worker_class.load(settings, progress)


def launch(worker: LoadableWorker, step: Step) -> Launched | Failure:
    """Launch the step. What it raises is its failure, but `WorkerLost`."""
    try:
        return worker.launch(step)
    except WorkerLost:
        raise
    except Exception as error:  # a doorway: the step has failed, and the next one runs
        line = line_of(error, step.step_id)
    worker.abandon(step, line)
    return Failure(line, worker.times)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads may still wait for other workers, who leave too
