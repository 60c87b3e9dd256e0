"""The entry point of `podway serve`: starts a worker process before it imports the server.

The worker imports torch for more than a second. Meanwhile this process imports the server, reads
the settings and loads the tokenizer.
"""

import argparse
import gc
import importlib
import time
from collections.abc import Callable
from typing import cast

from engine.transport.process import LocalLauncher
from gateway.serve.upgrade.inherited import Inherited

Serve = Callable[[list[str], LocalLauncher, float, Inherited | None], int]
WORKER = "engine.worker.process.worker:Worker"
# Flags with which no worker process is started, or not only one.
OTHER_STARTS = ("-h", "--help", "--pipeline-stages", "--tensor-ranks", "--launcher")


def parser() -> argparse.ArgumentParser:
    """The flags of `podway serve`."""
    make = cast("Callable[[], argparse.ArgumentParser]", _command("parser"))
    return make()


def main(argv: list[str]) -> int:
    """Serve until a signal, as `gateway.serve.command`."""
    began_at = time.perf_counter()
    inherited = Inherited.from_environment()
    gc.disable()  # imports create many objects that stay; the server enables it when it is ready
    launcher = LocalLauncher(WORKER)
    if not any(argument.startswith(OTHER_STARTS) for argument in argv):
        launcher.prepare()
    try:
        serve = cast("Serve", _command("main"))
        return serve(argv, launcher, began_at, inherited)
    finally:
        launcher.discard()


def _command(name: str) -> object:
    """A function of `gateway.serve.command`, whose imports take half a second."""
    return getattr(importlib.import_module("gateway.serve.command"), name)
