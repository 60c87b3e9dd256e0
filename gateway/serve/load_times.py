"""LoadTime: how long the last load of a model took on this machine, for forecasts of the next."""

import platform
from pathlib import Path

from gateway.groups.group import UNMEASURED_LOAD_SECONDS
from gateway.serve.saved import SavedFile
from gateway.settings.settings import Settings


class LoadTime:
    """The seconds of a model's last load, in the user's cache or in `--cache-dir`."""

    def __init__(self, settings: Settings) -> None:
        workers = settings.workers.num_stages, settings.workers.num_ranks
        facts: dict[str, object] = {
            "model": settings.model.source,
            "machine": platform.node(),
            "weights": [settings.kernels.weights, settings.kernels.dtype],
            "workers": list(workers),
        }
        directory: Path | None = settings.schedule.cache_dir
        self._file = SavedFile.of(facts, "load_time", directory)

    @property
    def seconds(self) -> float:
        """The seconds of the last load; a default before the first."""
        saved = self._file.load(float)
        return UNMEASURED_LOAD_SECONDS if saved is None else max(0.0, saved)

    def save(self, seconds: float) -> None:
        """Keep the seconds of a load."""
        self._file.save(round(seconds, 2))
