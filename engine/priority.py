"""Priorities of threads: work that may wait takes little of a core from workers and event loop.

Only for threads that rarely need the interpreter's lock. A thread of lower priority that asks for
it is waited for: the thread that gives it up goes on only when the other one has taken it.
"""

import os
import sys
import threading

LOWER = 5  # the niceness of threads that write the store or compile grammars
LOWEST = 19  # the niceness of threads that compute slow masks


def lower_thread_priority(niceness: int = LOWER) -> None:
    """Lower the priority of the calling thread. On Linux only: elsewhere the call would be for the
    whole process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
