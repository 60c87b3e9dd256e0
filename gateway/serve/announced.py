"""Runs the server with progress bars while it loads, and a banner when it is ready."""

import sys
import time

from engine.transport.process import LocalLauncher
from gateway.serve.assemble import Models, serve
from gateway.serve.start_times import StartTimes
from gateway.serve.terminal import LoadingBars, banner, models_banner, url_of
from gateway.serve.upgrade import systemd
from gateway.serve.upgrade.inherited import Inherited
from gateway.settings.settings import Settings


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
