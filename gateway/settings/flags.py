"""Command-line parsing: errors in one line with a suggestion, and the types of flag values."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from engine.setting import duration

N = TypeVar("N")
T = TypeVar("T")
PLOTS = (".png", ".pdf", ".svg")
_NOUNS = {"int": "a whole number", "float": "a number"}
_INVALID_NUMBER = re.compile(r"invalid (?P<kind>int|float) value: (?P<given>'.*')")
_INVALID_CHOICE = re.compile(r"invalid choice: '(?P<given>[^']*)' \(choose from (?P<names>.*)\)$")


class ShowDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default value to a flag's help, unless it is empty or false."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return super()._get_help_string(action) if action.default else action.help


class CommandLineError(SystemExit):
    """Ends the process with exit code 1 after the line `text` was written."""

    def __init__(self, text: str) -> None:
        super().__init__(1)
        self.text = text


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, with the nearest flag or value, and exits with 1.

    Flags cannot be abbreviated. `vllm_flags` says what vLLM's flags are here.
    """

    def __init__(self, prog: str, vllm_flags: Mapping[str, str] = {}, **kwargs: Any) -> None:
        super().__init__(prog=prog, allow_abbrev=False, **kwargs)
        self._vllm_flags = vllm_flags

    def parse_args(  # type: ignore[override] # argparse's overloads return Any's
        self, args: Sequence[str] | None = None, namespace: N | None = None
    ) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            kind = "unknown flag" if flag.startswith("-") else "unexpected argument"
            here = self._vllm_flags.get(flag.replace("_", "-"))
            hint = f"; vLLM's {flag} is {here} here" if here else ""
            self.error(f"{kind} {flag}{hint or did_you_mean(flag, self._option_string_actions)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        if choice := _INVALID_CHOICE.search(message):
            names = re.findall(r"'([^']*)'", choice["names"])
            message += did_you_mean(choice["given"], names)
        message = _INVALID_NUMBER.sub(
            lambda wrong: f"must be {_NOUNS[wrong['kind']]}, not {wrong['given']}", message
        )
        text = f"{self.prog}: {message} ({self.prog} --help lists all flags)"
        sys.stderr.write(f"{text}\n")
        raise CommandLineError(text)


def did_you_mean(given: str, names: Collection[str]) -> str:
    """`; did you mean X?` with the name nearest to `given`, or "" if none is near."""
    nearest = get_close_matches(given, names, n=1, cutoff=0.7)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def flag_type(
    read: Callable[[str], T], expected: str, allows: Callable[[T], bool] = lambda _: True
) -> Callable[[str], T]:
    """The type of a flag: what `read` makes of its text, if that is no ValueError and allowed."""

    def parse(text: str) -> T:
        with suppress(ValueError):
            if allows(value := read(text)):
                return value
        raise argparse.ArgumentTypeError(f"must be {expected}, not {text!r}")

    return parse


positive = flag_type(int, "a whole number, at least 1", lambda number: number >= 1)
natural = flag_type(int, "a whole number, at least 0", lambda number: number >= 0)
above_zero = flag_type(float, "a number above 0", lambda number: 0.0 < number < inf)
seconds = flag_type(
    duration, "a duration above 0 such as 50ms or 0.05s", lambda number: 0.0 < number < inf
)


def output_file(text: str) -> Path:
    """A file that can be written: checked before the work whose result it will contain."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"directory {path.parent} does not exist")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a directory, not a file")
    return path


def plot_file(text: str) -> Path:
    """An output file for a plot in a format of `PLOTS`; rejected where matplotlib, an extra, is not
    installed."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'podway[plots]'")
    path = output_file(text)
    if path.suffix.lower() not in PLOTS:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(PLOTS)}, not {text!r}")
    return path


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object such as {"top_k": 5}')
    return value
