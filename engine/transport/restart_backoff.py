"""Decides whether and when lost workers are restarted: at once, after a pause, or not any more.

A restart follows *progress* if the workers have returned a result since they were loaded. Without
progress each restart waits longer than the one before. Workers that crash while loading or in
their first step are in a crash loop, which ends after `max_restarts` such restarts in a row. (The
first step of a restarted worker belongs to no request, see `multiprocess.py`.) Workers that are
killed from outside are restarted any number of times if they make progress between, and `KILLS`
times as often if they do not.
"""

from dataclasses import dataclass, field

from engine.errors import Unavailable

KILLS = 10  # kills from outside that count as one crash


@dataclass(slots=True)
class RestartBackoff:
    """Counts restarts without progress. `max_restarts` 0: never restart.

    The first restart has no pause, the second one `first_pause` seconds; each further pause is
    twice as long, up to `max_pause`, or up to `max_kill_pause` if no worker has crashed by itself:
    whatever killed them, requests wait meanwhile.
    """

    max_restarts: int
    first_pause: float = 1.0
    max_pause: float = 30.0
    max_kill_pause: float = 2.0
    _num_crashes: int = field(default=0, init=False)  # in a row, without progress
    _num_kills: int = field(default=0, init=False)  # in a row, without progress
    _num_restarts: int = field(default=0, init=False)  # in a row, without progress

    def progressed(self) -> None:
        """The lost workers had made progress."""
        self._num_crashes = self._num_kills = self._num_restarts = 0

    def crashed(self, *, is_kill: bool = False) -> None:
        """The workers died while loading or before the first result of a step.

        `is_kill`: they were killed from outside.
        """
        if is_kill:
            self._num_kills += 1
        else:
            self._num_crashes += 1

    def next_pause(self) -> float:
        """Seconds to wait before the next restart. Raises `Unavailable` if it is not allowed."""
        if not self.max_restarts:
            raise Unavailable("the worker was lost, and restarts are disabled")
        if self._num_crashes + self._num_kills / KILLS > self.max_restarts:
            raise Unavailable(
                f"the worker was restarted {self._num_restarts} times in a row "
                "without completing a step"
            )
        doublings = min(self._num_restarts - 1, 30)  # so that the power stays finite
        self._num_restarts += 1
        if doublings < 0:
            return 0.0
        are_kills = self._num_kills and not self._num_crashes
        most = self.max_kill_pause if are_kills else self.max_pause
        return min(self.first_pause * 2.0**doublings, most)
