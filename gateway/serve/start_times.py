"""Where the time of a start went, in one line."""

from collections.abc import Callable

from gateway.serve.load import OnProgress

SLOW_SECONDS = 4.0  # a start that takes longer is explained
SHOWN_SECONDS = 0.05  # shorter parts are left out
IMPORTS, REST = "imports", "the rest"


class StartTimes:
    """Measures the parts of a start by the progress that workers report; passes it on to `show`.

    Imports end with the first report. After a part is done, and until the next one begins, the time
    counts as the rest.
    """

    def __init__(self, show: OnProgress, began_at: float, clock: Callable[[], float]) -> None:
        self._show = show
        self._clock = clock
        self._began_at = self._part_began_at = began_at
        self._part = IMPORTS
        self._seconds: dict[str, float] = {}

    def __call__(self, label: str, done: int, total: int) -> None:
        self._begin(label if done < total else REST)
        self._show(label, done, total)

    def _begin(self, part: str) -> None:
        if part == self._part:
            return
        now = self._clock()
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + now - self._part_began_at
        self._part, self._part_began_at = part, now

    def summary(self) -> str | None:
        """The duration up to now and its parts; None if the start was quick."""
        self._begin("")
        total = self._part_began_at - self._began_at
        if total < SLOW_SECONDS:
            return None
        shown = {name: took for name, took in self._seconds.items() if took >= SHOWN_SECONDS}
        parts = ", ".join(f"{took:.1f} s {name}" for name, took in shown.items())
        return f"took {total:.1f} s: {parts}"
