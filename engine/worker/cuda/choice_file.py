"""Choices that were made at a start, kept in a JSON file so that later starts do not differ."""

import contextlib
import json
import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


class ChoiceFile:
    """Names by key. A `path` of None, or one that cannot be written, keeps them in memory only."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._choices = _read(path)

    def get(self, key: str) -> str:
        """The choice; empty if there is none."""
        return str(self._choices.get(key, ""))

    def put(self, key: str, choice: str) -> None:
        """Keep a choice and write the file as a whole, with what other workers have written."""
        self._choices = {**self._choices, **_read(self.path), key: choice}
        if self.path is None:
            return
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self._choices, indent=1, sort_keys=True) + "\n")
            part.replace(self.path)
        except OSError as error:
            logger.warning("choices of kernels are not kept for later starts: %s", error)
            with contextlib.suppress(OSError):
                part.unlink()
            self.path = None  # one warning is enough


def _read(path: Path | None) -> dict[str, str]:
    """The choices in the file; none if there is no such file or it is damaged."""
    try:
        choices = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return choices if isinstance(choices, dict) else {}


def file_of(directory: str, *words: str) -> Path | None:
    """The file named by these words, such as the GPU and versions; None without a directory."""
    if not directory:
        return None
    name = "".join(each if each.isalnum() else "-" for each in " ".join(words))
    return Path(directory) / f"{name.lower()}.json"
