"""The front door: `podway COMMAND`, also as `python -m gateway`.

Only this file is loaded to say `--help`; each command's module is named as a string and loaded
when asked for. Everything that ends a command early becomes one line and an exit code here.
"""

import argparse
import importlib
import logging
import sys
from collections.abc import Callable
from typing import cast

from engine.errors import StartupError
from gateway.commands.flags import Parser

COMMANDS = {
    "serve": ("gateway.serve.command:main", "serve a model over OpenAI's API"),
    "chat": ("gateway.commands.chat.command:main", "talk to a server in the terminal"),
    "simulate": (
        "gateway.commands.simulate.command:main",
        "play a load through the engine in virtual time",
    ),
    "bench": ("gateway.commands.bench.command:main", "drive a server and report its latencies"),
}
EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command to its end; the exit code."""
    try:
        return _dispatch(argv)
    except StartupError as refusal:
        sys.stderr.write(f"podway: {refusal}\n")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:
        logging.getLogger("podway").exception("podway ended because of a bug")
    return EXIT_REFUSED


def _dispatch(argv: list[str]) -> int:
    command = _parser().parse_args(argv[:1] or ["--help"]).command
    module, _, name = COMMANDS[command][0].partition(":")
    function = cast("Callable[[list[str]], int]", getattr(importlib.import_module(module), name))
    return function(argv[1:])


def _parser() -> Parser:
    commands = "\n".join(f"  {name:8}{says}" for name, (_, says) in COMMANDS.items())
    parser = Parser(
        "podway",
        usage="podway COMMAND [...]",
        description="An OpenAI-compatible gateway with its own serving engine.",
        epilog=f"commands:\n{commands}\n\npodway COMMAND --help says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="the version, then exit")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


class _Version(argparse.Action):
    """Reads the version only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        metadata = importlib.import_module("importlib.metadata")
        sys.stdout.write(f"podway {metadata.version('podway')}\n")
        parser.exit()


if __name__ == "__main__":
    main()
