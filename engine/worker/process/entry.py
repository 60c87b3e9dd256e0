"""The entry point of a worker process: reads the settings, loads the worker, runs steps in order.

A thread receives steps as they come, so that a stage knows a step before its hidden states arrive,
unless steps come one at a time; if results have to be waited for, another thread sends them. The
process ends when it receives a goodbye, when its parent closes the connection or dies, and on
SIGTERM. If a step raises, its failure is sent and the worker continues, unless it raised
`WorkerLost`. If loading raises, one readable line is sent.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from engine.errors import KernelFaulted, StartupError, WorkerLost
from engine.json_log import set_up_json_logs
from engine.lora import LoraReport
from engine.step import Step
from engine.transport.process_memory import drop_library_pages, keep_heap, trim_heap
from engine.transport.wire import (
    FrameReader,
    Goodbye,
    LoadFailed,
    LoadLora,
    LoadProgress,
    LoadWorker,
    LoraLoaded,
    RunStep,
    SendPixels,
    ToWorker,
    UnloadLora,
    WireError,
    WorkerLoaded,
    frame,
    read_to_worker,
)
from engine.worker.cpu import no_compiler
from engine.worker.cpu.compiler_process import CompilerProcess
from engine.worker.launched import StepInFlight
from engine.worker.process.results import (
    Failure,
    ReceivedStep,
    ResultSender,
    describe,
    line_of,
    one_line,
)
from engine.worker.process.torch_import import (
    NVIDIA,
    import_unused_later,
    skip_meta_registrations,
    skip_scipy,
)
from engine.worker_settings import WorkerSettings

if TYPE_CHECKING:
    from engine.worker.process.worker import Worker

logger = logging.getLogger("engine.worker")  # the module itself runs as __main__

RECEIVE_BYTES = 1 << 18
IDLE_SECONDS = 0.5  # after the start, until the worker warms up: a first request would wait for it
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_NAME = 15
PR_SET_TIMERSLACK = 29

Received: TypeAlias = "SimpleQueue[ReceivedStep | Exception | None]"


class Parent:
    """The engine process at the other end of a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader()
        self._payloads: deque[bytearray] = deque()
        self._room = memoryview(bytearray(RECEIVE_BYTES))
        self._sending = threading.Lock()  # several threads send

    def receive(self) -> ToWorker:
        """Wait for the next message. Raises `EOFError` when the parent has hung up."""
        while not self._payloads:
            num_bytes = self._connection.recv_into(self._room)
            if num_bytes == 0:
                raise EOFError
            self._payloads.extend(self._frames.feed(self._room[:num_bytes]))
        return read_to_worker(self._payloads.popleft())

    def is_sending(self, seconds: float) -> bool:
        """Whether a message comes, or the parent hangs up, within so many seconds."""
        return bool(self._payloads or select.select([self._connection], (), (), seconds)[0])

    def send(self, data: bytearray) -> None:
        """Send one frame. Raises `ConnectionError` when the parent has closed the connection."""
        with self._sending:
            self._connection.sendall(data)

    def progress(self, what: str, done: int, total: int) -> None:
        self.send(frame(LoadProgress(what, done, total)))


def main() -> int:
    """Serve one parent until it sends a goodbye or is gone; returns the exit code."""
    parser = argparse.ArgumentParser(description="A worker process; the gateway starts it.")
    parser.add_argument("--socket", type=int, required=True, help="inherited file descriptor")
    parser.add_argument("--parent", type=int, required=True, help="process id")
    parser.add_argument("worker", help="the class to load, as module:Class")
    arguments = parser.parse_args()
    configure_process(arguments.parent)
    skip_meta_registrations()
    import_unused_later()
    skip_scipy()
    compiler = None if NVIDIA.exists() else no_compiler.begin()
    with socket.socket(fileno=arguments.socket) as connection:
        connection.set_inheritable(False)
        try:
            return serve(Parent(connection), arguments.worker, compiler=compiler)
        except (EOFError, ConnectionError):
            return 0
        except (WorkerLost, WireError) as error:
            logger.error("the worker stops: %s", error)
            return 1


def configure_process(parent: int) -> None:
    """Ignore Ctrl-C, which the parent handles, end with the parent, and configure logging."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends the process even during a long step
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s worker[{os.getpid()}] %(levelname)s %(message)s",
    )
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        prctl(PR_SET_NAME, b"podway-worker")  # at most 15 bytes
        # Compute threads that wait sleep for 20 µs: by default the kernel may add 50.
        prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1))
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit(0)


def serve(
    parent: Parent,
    worker_path: str,
    listener: int | None = None,
    compiler: CompilerProcess | None = None,
) -> int:
    """Receive settings, send progress and report, then run steps. Returns the exit code.

    `listener` replaces the placement's, if this process opened the socket and not the parent.
    With a `compiler` kernels of the CPU run from object files.

    Raises `EOFError` or `ConnectionError` when the parent is gone, `WorkerLost` when the worker
    cannot continue.
    """
    try:
        with _without_gc():
            try:
                worker_class = class_of(worker_path)  # takes seconds, in which the settings come
                no_compiler.settle(compiler)
            finally:
                settings = receive_settings(parent, listener)
                if settings.cores:  # its memory is then on their node, where it is first touched
                    os.sched_setaffinity(0, settings.cores)
                if settings.logs_json:
                    set_up_json_logs(logging.INFO, os.getpid())
            worker = worker_class.load(settings, parent.progress)
            gc.freeze()  # later collections skip the model, and none delays the start
        parent.send(frame(WorkerLoaded(worker.report)))
    except (ConnectionError, EOFError, WireError):
        raise
    except StartupError as error:
        may_retry = isinstance(error, KernelFaulted)
        parent.send(frame(LoadFailed(one_line(str(error)), may_retry)))
        return 1
    except Exception as error:
        logger.exception("the worker could not load")
        parent.send(frame(LoadFailed(f"the worker could not load: {describe(error)}")))
        return 1
    if compiler is not None:
        compiler.finish()
    drop_library_pages()  # while the server gets ready
    trim_heap()
    keep_heap()
    worker.check()
    if not parent.is_sending(IDLE_SECONDS):
        worker.warm_up()
    received: Received = SimpleQueue()
    placement = settings.placement
    answers = ResultSender(
        parent.send, received.put, answers=placement.returns_results, traces=settings.traces
    )
    waits = placement.num_workers > 1 or worker.report.device != "cpu"
    for order in orders(parent, worker, received, waits=waits):
        answers.put(order, launch(worker, order.step))
    answers.finish()
    return 0


@contextmanager
def _without_gc() -> Iterator[None]:
    """Without garbage collection: imports create many objects that stay, and collections among
    them take a sixth of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def orders(
    parent: Parent, worker: "Worker", received: Received, *, waits: bool
) -> Iterator[ReceivedStep]:
    """Steps in order until a goodbye.

    A worker that `waits` for results or for other workers receives them in a thread, which prepares
    them and whose error is raised here. Any other one receives them between two steps, which takes
    no wake-up of another thread, until a step was planned ahead or pixels have come: then the next
    messages come while a step is computed.
    """
    incoming = receive_steps(parent, worker)
    if not waits and (yield from _one_at_a_time(incoming)):
        return

    def listen() -> None:
        try:
            for order in incoming:
                if order is not None:
                    worker.learn(order.step)
                    received.put(order)
            received.put(None)
        except Exception as error:  # raised in the other thread
            received.put(error)

    threading.Thread(target=listen, name="podway-control", daemon=True).start()
    while True:
        found = received.get()
        if found is None:
            return
        if isinstance(found, Exception):
            raise found
        yield found


def _one_at_a_time(
    incoming: Iterator[ReceivedStep | None],
) -> Generator[ReceivedStep, None, bool]:
    """Steps until one was planned ahead or pixels come; returns whether none follows."""
    for order in incoming:
        if order is not None:
            yield order
        if order is None or order.step.is_ahead:
            return False
    return True


def receive_steps(parent: Parent, worker: "Worker") -> Iterator[ReceivedStep | None]:
    """Steps as they come, until a goodbye; None for pixels. LoRA adapters are loaded in a thread:
    neither steps nor messages wait for files."""
    lora_thread = LoraThread(parent, worker)
    while not isinstance(message := parent.receive(), Goodbye | LoadWorker):
        if isinstance(message, RunStep):
            yield ReceivedStep(message.step, time.monotonic())
        elif isinstance(message, SendPixels):
            worker.put_pixels(message.piece)
            yield None
        else:
            lora_thread.put(message)


class LoraThread:
    """Loads and unloads LoRA adapters in the order of the messages, in a thread of its own, which
    starts with the first one and ends with the process."""

    def __init__(self, parent: Parent, worker: "Worker") -> None:
        self._parent = parent
        self._worker = worker
        self._messages: SimpleQueue[LoadLora | UnloadLora] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, message: LoadLora | UnloadLora) -> None:
        self._messages.put(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="podway-lora", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            message = self._messages.get()
            if isinstance(message, UnloadLora):
                self._worker.unload_lora(message.lora_id)
                continue
            try:
                report = self._worker.load_lora(message.spec)
            except Exception as error:  # only this adapter fails
                logger.exception("a LoRA adapter could not be loaded")
                report = LoraReport(message.spec.lora_id, error=describe(error))
            with contextlib.suppress(ConnectionError):  # the thread that receives reports it
                self._parent.send(frame(LoraLoaded(report)))


def class_of(worker_path: str) -> "type[Worker]":
    """Import the worker class "module:Class"."""
    module, _, name = worker_path.partition(":")
    worker_class: type[Worker] = getattr(importlib.import_module(module), name)
    return worker_class


def receive_settings(parent: Parent, listener: int | None) -> WorkerSettings:
    """Wait for the first message. Raises `WireError` if it is another one."""
    opening = parent.receive()
    if not isinstance(opening, LoadWorker):
        raise WireError(f"{type(opening).__name__} came before the settings")
    if listener is None:
        return opening.settings
    placement = replace(opening.settings.placement, listener=listener)
    return replace(opening.settings, placement=placement)


def launch(worker: "Worker", step: Step) -> StepInFlight | Failure:
    """Launch the step. Any error but `WorkerLost` is returned as its failure."""
    try:
        return worker.launch(step)
    except WorkerLost:
        raise
    except Exception as error:  # only this step fails
        line = line_of(error, step.step_id)
    worker.abandon(step, line)
    return Failure(line, worker.times)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # threads may still wait for other workers, which end too
