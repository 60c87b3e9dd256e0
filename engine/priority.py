"""Priorities of threads: work that may wait never takes a core from workers and the event loop."""

import os
import sys
import threading

LOWER = 5  # the niceness of threads that tokenize, write the store, or compile grammars


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread. On Linux only: elsewhere the call would be for the
    whole process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWER)
