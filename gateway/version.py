"""The version of this Podway, also where it runs from a checkout that was never installed."""

import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "podway"
PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@cache
def podway_version() -> str:
    """The installed distribution's version, else that of the checkout's pyproject.toml."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return str(tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["version"])
