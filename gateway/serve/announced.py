"""Runs the server with progress bars while it loads, and a banner when it is ready."""

import sys
import time
from collections.abc import Callable

from engine.transport.process import LocalLauncher
from gateway.serve.assemble import Models, serve
from gateway.serve.load import OnProgress
from gateway.serve.terminal import LoadingBars, banner, models_banner, url_of
from gateway.serve.upgrade import systemd
from gateway.serve.upgrade.inherited import Inherited
from gateway.settings.settings import Settings

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


def serve_announced(
    settings: Settings,
    launcher: LocalLauncher | None,
    began_at: float,
    inherited: Inherited | None = None,
) -> bool:
    """Serve as `gateway.serve.assemble.serve`; the process began at `began_at`."""
    with LoadingBars(sys.stderr, logs=settings.observe.log_format == "json") as bars:
        times = StartTimes(bars, began_at, time.perf_counter)

        def announce(port: int, models: Models) -> None:
            bars.stop()
            systemd.notify("READY=1")
            url = url_of(settings.http.host, port, "https" if settings.http.tls_cert else "http")
            if len(models.groups) > 1:
                sys.stdout.write(models_banner(url, models.groups))
                sys.stdout.flush()
                return
            opener = models.openers[0]
            loaded, own = opener.latest, opener.settings
            cost = f"{loaded.calibration}; lookahead {'on' if loaded.lookahead else 'off'}"
            more = {"sampling": f"defaults {loaded.sampling_defaults}", "cost": cost}
            if own.loras.lora:
                more["lora"] = ", ".join(value.partition("=")[0] for value in own.loras.lora)
            if (summary := times.summary()) is not None:
                more["start"] = summary
            sys.stdout.write(banner(url, loaded.name, loaded.report, own, more))
            sys.stdout.flush()

        return serve(settings, launcher, progress=times, announce=announce, inherited=inherited)
