"""Runs the server with progress bars while it loads, and a banner when it is ready."""

import sys
import time

from engine.transport.process import LocalLauncher
from gateway.serve.assemble import serve
from gateway.serve.load import LoadedModel
from gateway.serve.start_times import StartTimes
from gateway.serve.terminal import LoadingBars, banner, url_of
from gateway.settings.settings import Settings


def serve_announced(settings: Settings, launcher: LocalLauncher | None, began_at: float) -> None:
    """Serve until a signal, as `gateway.serve.assemble.serve`; the process began at `began_at`."""
    with LoadingBars(sys.stderr, logs=settings.observe.log_format == "json") as bars:
        times = StartTimes(bars, began_at, time.perf_counter)

        def announce(port: int, loaded: LoadedModel) -> None:
            bars.stop()
            url = url_of(settings.http.host, port, "https" if settings.http.tls_cert else "http")
            cost = f"{loaded.calibration}; lookahead {'on' if loaded.lookahead else 'off'}"
            more = {"sampling": f"defaults {loaded.sampling_defaults}", "cost": cost}
            if settings.loras.lora:
                more["lora"] = ", ".join(value.partition("=")[0] for value in settings.loras.lora)
            if (summary := times.summary()) is not None:
                more["start"] = summary
            sys.stdout.write(banner(url, loaded.name, loaded.report, settings, more))
            sys.stdout.flush()

        serve(settings, launcher, progress=times, announce=announce)
