"""SavedFile: a JSON file of what a server has measured or learned, valid for certain facts.

A file's name is a digest of the facts (the model, and for costs the machine and configuration), and
it contains them and a checksum of its value. A file that is corrupt or has other facts is ignored
with a warning.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_cache_path

from engine.files import replace_file, split_files
from gateway.settings.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NAME_DIGITS = 24


def cache_folder(given: Path | None) -> Path:
    """`--cache-dir`, or the user's cache."""
    return Path(given or user_cache_path("podway", appauthor=False))


def tokenizers_folder(given: Path | None) -> Path:
    """Where tokenizers are kept."""
    return cache_folder(given) / "tokenizers"


def model_facts(directory: Path) -> dict[str, object]:
    """The facts that identify a checkpoint: its config and the sizes of its weight files, so that
    no large file is read."""
    config = directory / "config.json"
    files = split_files(directory) if directory.is_file() else directory.glob("*.safetensors")
    weights = sorted((path.name, path.stat().st_size) for path in files)
    return {
        "model": str(directory.resolve()),
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else "",
        "weights": [list(pair) for pair in weights],
    }


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One value under the field `name`, beside the facts for which it is valid."""

    path: Path
    facts: Mapping[str, object]
    name: str

    @classmethod
    def of(cls, facts: Mapping[str, object], name: str, directory: Path | None) -> "SavedFile":
        """The file for these facts, in the user's cache or in `directory`."""
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return cls(
            cache_folder(directory) / f"{name}s" / f"{digest[:_NAME_DIGITS]}.json", facts, name
        )

    def load(self, parse: Callable[[Any], T]) -> T | None:
        """The saved value. None if there is no usable file; one that cannot be used is logged.
        `parse` raises ValueError for a wrong value."""
        try:
            saved = json.loads(self.path.read_bytes())
            if not isinstance(saved, dict) or saved.get("facts") != self.facts:
                raise ValueError("it is for another model or machine")
            if saved.get("sha256") != _digest(saved[self.name]):
                raise ValueError("it is damaged, or was changed by hand")
            return parse(saved[self.name])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("ignoring the saved %s in %s: %s", self.name, self.path, error)
            return None

    def save(self, value: object) -> None:
        """Replace the file atomically. A failure is logged, not raised."""
        content = {"facts": self.facts, self.name: value, "sha256": _digest(value)}
        try:
            replace_file(self.path, json.dumps(content, indent=1).encode())
        except OSError as error:
            logger.warning("cannot save the %s in %s: %s", self.name, self.path, error)


def _digest(value: object) -> str:
    """The SHA-256 of a value, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def load_time_file(settings: Settings) -> SavedFile:
    """The seconds that the last load of a model took on this machine, for forecasts of the next."""
    facts: dict[str, object] = {
        "model": settings.model.source,
        "machine": platform.node(),
        "weights": [settings.kernels.weights, settings.kernels.dtype],
        "workers": [settings.workers.num_stages, settings.workers.num_ranks],
    }
    return SavedFile.of(facts, "load_time", settings.schedule.cache_dir)
