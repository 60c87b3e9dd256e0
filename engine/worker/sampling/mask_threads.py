"""The threads that compute masks, and how they share the worker's cores and interpreter.

A mask is computed without the interpreter's lock, but a matcher holds it while it reads a token:
for milliseconds if the grammar is ambiguous. So outputs are read token by token, and those of slow
rows in a thread of ordinary priority, because a thread that holds the lock and does not get a core
would stop the worker. Beside other rows this thread rests `READING_REST` times as long as it has
read.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from engine.grammar import Matcher
from engine.priority import LOWEST, lower_thread_priority

MASK_THREADS = 2
MASK_WAIT_SECONDS = 0.005  # a batch waits so long for late rows at most; a slower mask is slow
READING_REST = 50.0  # seconds of rest for each second in which slow rows' outputs were read


class MaskThreads:
    """The threads that compute masks, and what they need to know of the last step."""

    def __init__(self) -> None:
        lowest = partial(lower_thread_priority, LOWEST)
        self._fast = ThreadPoolExecutor(MASK_THREADS, "mask")
        self._slow = ThreadPoolExecutor(1, "slow mask", lowest)
        self.reading = ThreadPoolExecutor(1, "slow output")  # outputs of slow rows
        self.wait_seconds = MASK_WAIT_SECONDS  # a mask that takes more CPU time is slow
        self.has_others = False  # whether the last step had rows that are not slow

    def masking(self, *, is_slow: bool) -> ThreadPoolExecutor:
        """The threads for masks of slow rows, or of all other rows."""
        return self._slow if is_slow else self._fast

    def read(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        """Read the tokens one by one: other threads can take the interpreter's lock in between."""
        for token in tokens:
            matcher.feed((token,))

    def read_slowly(self, matcher: Matcher, tokens: Sequence[int]) -> None:
        """Read like `read`, with a rest after each token if the batch has rows that are not
        late."""
        for token in tokens:
            began = time.thread_time()
            matcher.feed((token,))
            if self.has_others:
                time.sleep(READING_REST * (time.thread_time() - began))


class ThreadClock:
    """The CPU time of the thread that makes it, which other threads can read; elsewhere than on
    Linux, wall time. A thread that has to wait for a core is not slow."""

    def __init__(self) -> None:
        has_clock = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clock else None
        self._made_at, self._began_at = time.perf_counter(), self._now()

    @property
    def age(self) -> float:
        """Seconds of wall time since it was made."""
        return time.perf_counter() - self._made_at

    @property
    def seconds(self) -> float:
        """Seconds of CPU time since it was made; the thread still exists."""
        return self._now() - self._began_at

    def _now(self) -> float:
        return time.perf_counter() if self._clock is None else time.clock_gettime(self._clock)
