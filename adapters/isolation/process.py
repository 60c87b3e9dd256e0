"""The server's side: starts the process, and ends it."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

EXIT_SECONDS = 1.0  # for the process to end its children, before it is killed
STDERR = 2


def start(
    module: str, arguments: Sequence[str], kind: socket.SocketKind, variables: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that runs the module with a socket's descriptor before these arguments, and the
    other end of the socket, which does not block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.setblocking(False)
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            env={**os.environ, "PYTHONPATH": paths, **variables},
        )
    return process, ours


def reap(process: "subprocess.Popen[bytes]") -> None:
    """Wait until the process, whose socket is closed, has ended its children."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(EXIT_SECONDS)
    process.kill()
    process.wait()
