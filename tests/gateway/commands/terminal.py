"""A command of `podway` at a pseudo-terminal."""

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def at_terminal(
    argv: Sequence[str], env: Mapping[str, str]
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The terminal's other end, and the process, which ends with the block."""
    master, slave = pty.openpty()
    code = "import signal, sys, gateway.__main__ as m; "
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); "  # the parent may ignore it
    command = [sys.executable, "-c", code + "sys.exit(m.run(sys.argv[1:]))", *argv]
    child = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **env}
    )
    os.close(slave)
    try:
        yield master, child
    finally:
        child.kill()
        child.wait()
        os.close(master)


def read_until(terminal: int, pattern: bytes) -> None:
    """Read the program's output until it matches; fails if the program ends or hangs."""
    shown = b""
    while not re.search(pattern, shown, re.DOTALL):
        assert select.select([terminal], [], [], 30)[0], f"waited for {pattern!r}, saw {shown!r}"
        shown += os.read(terminal, 1024)
