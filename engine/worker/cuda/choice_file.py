"""Choices that were measured at a start, kept in a JSON file so that later starts do not differ."""

import json
import os
from pathlib import Path


class ChoiceFile:
    """Names by key; `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found = _read(path)

    def get(self, key: str) -> str:
        """The choice; empty if there is none."""
        return str(self._found.get(key, ""))

    def put(self, key: str, choice: str) -> None:
        """Keep a choice and write the file, which other workers may replace as a whole."""
        self._found[key] = choice
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(self._found, indent=1, sort_keys=True) + "\n")
        part.replace(self._path)


def _read(path: Path | None) -> dict[str, str]:
    """The choices in the file; none if there is no such file or it is damaged."""
    try:
        found = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def file_of(directory: str, *words: str) -> Path | None:
    """The file named by these words, such as the GPU and versions; None without a directory."""
    if not directory:
        return None
    name = "".join(each if each.isalnum() else "-" for each in " ".join(words))
    return Path(directory) / f"{name.lower()}.json"
