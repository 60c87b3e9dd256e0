"""The pace of an engine that computes nothing, the same for each server. Standard library only:
the servers' own Pythons import it."""

import os
import time
from pathlib import Path

RATE = "FRONT_ENDS_RATE"  # variables of the environment
PID_FILE = "FRONT_ENDS_PID_FILE"
TOKEN = "FRONT_ENDS_TOKEN"


class Pace:
    """Ends `FRONT_ENDS_RATE` iterations per second, and writes the engine's process id to
    `FRONT_ENDS_PID_FILE`. Every request gets the token `FRONT_ENDS_TOKEN` in each iteration."""

    def __init__(self) -> None:
        self.token = int(os.environ[TOKEN])
        self.period = 1 / float(os.environ[RATE])
        self._next = 0.0
        Path(os.environ[PID_FILE]).write_text(str(os.getpid()))

    def wait(self) -> None:
        """Sleep until the iteration ends; one that begins late ends at once."""
        now = time.perf_counter()
        self._next = max(self._next + self.period, now)
        time.sleep(self._next - now)
