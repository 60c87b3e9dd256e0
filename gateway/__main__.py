"""The command line: `podway COMMAND`, also as `python -m gateway`.

`--help` loads this file only: each command's module is named by a string and imported when the
command runs. Every error that ends a command becomes one line and an exit code here.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Callable
from typing import cast

from engine.errors import EngineError
from gateway.commands.table import COMMANDS
from gateway.settings.flags import Parser

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command to its end; returns the exit code."""
    try:
        return _dispatch(argv)
    except EngineError as error:
        sys.stderr.write(f"podway: {error}\n")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        logging.getLogger("podway").exception("podway ended because of a bug")
    return EXIT_FAILED


def _dispatch(argv: list[str]) -> int:
    command = _parser().parse_args(argv[:1] or ["--help"]).command
    module, _, name = COMMANDS[command][0].partition(":")
    function = cast("Callable[[list[str]], int]", getattr(importlib.import_module(module), name))
    return function(argv[1:])


def _parser() -> Parser:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  {name:{width}}{text}" for name, (_, text) in COMMANDS.items())
    parser = Parser(
        "podway",
        usage="podway COMMAND [...]",
        description="An OpenAI-compatible LLM gateway with its own serving engine.",
        epilog=f"commands:\n{commands}\n\nRun podway COMMAND --help for the flags of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


class _Version(argparse.Action):
    """Reads the version only if it is requested, because importlib.metadata is slow."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        version = importlib.import_module("gateway.version")
        sys.stdout.write(f"podway {version.podway_version()}\n")
        parser.exit()


if __name__ == "__main__":
    main()
