"""Command lines: a parser whose complaints are one line, and the kinds of values flags take."""

import argparse
import json
from typing import Any, NoReturn


class ShowDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to a flag's help where there is one worth naming."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and exits with 1; knows no abbreviations."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.prog}: {message} ({self.prog} --help lists what there is)\n")


def positive(text: str) -> int:
    """A whole number from 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return number


def natural(text: str) -> int:
    """A whole number from 0."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {text}")
    return number


def above_zero(text: str) -> float:
    """A finite number above 0."""
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object such as {"top_k": 5}')
    return value
