"""The command line: `podway COMMAND`, also as `python -m gateway`.

`--help` loads this file only: each command's module is named by a string and imported when the
command runs. Every error that ends a command becomes one line and an exit code here.
"""

import argparse
import importlib
import logging
import os
import select
import sys
from collections.abc import Callable
from typing import cast

from engine.errors import EngineError
from gateway.commands.table import COMMANDS
from gateway.settings.flags import Parser

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
STDOUT = 1
EXIT_UNREAD = 141  # as of a program that SIGPIPE ends


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
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            return EXIT_UNREAD
        logging.getLogger("podway").exception("podway ended because of a bug")
    return EXIT_FAILED


def _is_unread() -> bool:
    """Whether what reads the output has ended, as `head` does; then the rest is thrown away."""
    output = select.poll()
    output.register(STDOUT, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
    return True


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
