"""The program that a server becomes after its requests have ended, if others know its process.

A container, a terminal and a script know the process that they started. It stays until its last
successor has ended, passes signals on to it and ends with its exit code. It runs alone
(`python -I -S`), so that it needs little memory.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2}
AWAITED = {*FORWARDED, signal.SIGCHLD}
_taken: list[int] = []  # signals that another thread took after `remember_signals`


def block_signals() -> None:
    """Keep signals pending until this process waits for them, also across `execv`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)


def remember_signals() -> None:
    """Let no signal end this process: one that is blocked here can reach another thread."""
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _taken.append(number))


def become_waiter() -> None:
    """Replace this process by the program; does not return."""
    block_signals()
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, *map(str, _taken)])


def children(parent: int) -> list[int]:
    """The child processes of a process."""
    own = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            after_name = path.read_text().rpartition(")")[2].split()
            if int(after_name[1]) == parent:
                own.append(int(path.parent.name))
    return own


def wait_for_children(taken: list[int]) -> int:
    """Pass on the signals that were taken, then others, until no child is left; the exit code of
    the one that ended last."""
    code = 0
    for number in taken:
        _pass_on(number)
    while True:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return code if code >= 0 else 128 - code
        number = signal.sigwait(AWAITED)
        if number in FORWARDED:
            _pass_on(number)


def _pass_on(number: int) -> None:
    for child in children(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(child, number)


if __name__ == "__main__":
    sys.exit(wait_for_children([int(number) for number in sys.argv[1:]]))
