"""Worker processes on this machine: spawned, connected by a socket pair, always reaped.

A child is a new interpreter that runs `engine.worker.process.entry` with this process's module
path and one end of a socket pair. Closing the other end asks the child to exit; a child which
does not is terminated, then killed. The child also exits when this process dies (see
`engine.worker.process.entry`).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from engine.errors import StartupError
from engine.transport.launcher import WorkerExit, placements
from engine.worker_settings import Placement

STDERR = 2
KILL_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class WorkerProcess:
    """Owns a child process and the parent's end of its socket, from `spawn` to `end`."""

    def __init__(
        self, placement: Placement, process: subprocess.Popen[bytes], connection: socket.socket
    ) -> None:
        self.placement = placement
        self._process = process
        self._signals_sent: set[int] = set()
        self.connection = connection  # non-blocking

    @classmethod
    def spawn(cls, placement: Placement, worker: str, env: Mapping[str, str]) -> Self:
        """Start a process for the class `worker` ("module:Class"); `env` is added to the
        environment.

        The child inherits the placement's `listener`. Raises `StartupError` if the process
        cannot be started.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        # The parent's module path in its order, so that both processes import the same code.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        arguments = ["--socket", str(theirs.fileno()), "--parent", str(os.getpid())]
        inherited = [theirs.fileno()]
        if placement.listener is not None:
            inherited.append(placement.listener)
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "engine.worker.process.entry", *arguments, worker],
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,
                    env={**os.environ, "PYTHONPATH": paths, **env},
                    process_group=0,  # Ctrl-C at the terminal is for the parent alone
                )
            except OSError as error:
                ours.close()
                raise StartupError(f"cannot start a worker process: {error}") from error
        return cls(placement, process, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL; `end` must still reap the process."""
        self._send(signal.SIGKILL)

    def reap(self) -> None:
        """Wait until the process has ended and close the connection."""
        self._process.wait()
        self.connection.close()

    async def end(self, grace: float) -> WorkerExit:
        """Close the connection, wait, terminate, wait, kill; each wait is at most `grace` seconds.

        Idempotent.
        """
        import asyncio  # not before the first worker is started: that takes as long as all else

        with contextlib.suppress(OSError):  # either end may be closed already
            self.connection.shutdown(socket.SHUT_RDWR)  # also wakes a pending read
        exited = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                done, _ = await asyncio.wait({exited}, timeout=grace)
                if done:
                    break
                self._send(number)
            return exit_of(await exited, self._signals_sent)
        finally:
            self._process.kill()  # if this coroutine is cancelled; no effect once reaped
            self.connection.close()

    def _send(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has already been reaped."""
        if self._process.poll() is None:
            self._signals_sent.add(number)
            self._process.send_signal(number)


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """A `Launcher` of child processes which run the class `worker` with `env` added.

    `ready` are processes that were started before it was known how many there will be: a model
    with one worker uses one of them.
    """

    worker: str
    env: Mapping[str, str] = field(default_factory=dict)
    ready: list[WorkerProcess] = field(default_factory=list)

    def prepare(self) -> None:
        """Start a process that imports its code and then waits for its settings.

        Raises `StartupError`.
        """
        (place,) = placements(1, 1)
        self.ready.append(WorkerProcess.spawn(place, self.worker, self.env))

    def discard(self) -> None:
        """Kill the processes that were prepared and not used."""
        for process in self.ready:
            process.kill()
            process.reap()
        self.ready.clear()

    async def launch(self, num_stages: int, num_ranks: int) -> list[WorkerProcess]:
        """Start the child processes; they connect to each other through a loopback listener that
        is open before any of them starts, so no other process can take its port."""
        places = placements(num_stages, num_ranks)
        if len(places) == 1 and self.ready:
            return [self.ready.pop()]
        self.discard()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            if len(places) > 1:
                meeting = f"127.0.0.1:{listener.getsockname()[1]}"
                places = [
                    replace(
                        place,
                        rendezvous=meeting,
                        listener=listener.fileno() if place.index == 0 else None,
                        num_local_workers=len(places),
                        local_index=place.index,
                    )
                    for place in places
                ]
            started: list[WorkerProcess] = []
            try:
                started.extend(
                    WorkerProcess.spawn(place, self.worker, self.env) for place in places
                )
            except StartupError:
                for process in started:
                    await process.end(grace=0.0)
                raise
        return started

    async def close(self) -> None:
        """End processes that were prepared and not used; the others share nothing."""
        self.discard()


def exit_of(returncode: int, signals_sent: Collection[int] = ()) -> WorkerExit:
    """How a process with this return code ended.

    `signals_sent` are the signals that this process has sent. SIGKILL from elsewhere may be the
    kernel's out-of-memory killer, which cannot be known here.
    """
    if returncode >= 0:
        return WorkerExit(f"ended with exit code {returncode}")
    number = -returncode
    name = f"signal {number}, {signal.strsignal(number)}"
    if number in signals_sent:
        return WorkerExit(f"was killed by the server ({name})")
    hint = " (not by the server; possibly out of memory)" if number == signal.SIGKILL else ""
    return WorkerExit(f"was killed by {name}{hint}", is_kill=number in KILL_SIGNALS)
