"""A real `mooncake_master` on this machine; tests skip where its package does not load."""

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from adapters.cluster import mooncake
from engine.errors import StartupError

SECONDS_TO_START = 20.0


def need_mooncake() -> str:
    """The path of `mooncake_master`; skips the test where its package does not load."""
    command = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("needs pip install 'podway[mooncake]'")
    try:
        mooncake._load_client()
    except StartupError as error:
        pytest.skip(str(error))
    return command


@contextmanager
def running_master(segment: str = "64MiB") -> Iterator[str]:
    """The URL of a store whose clients lend so much memory."""
    command = need_mooncake()
    port, metrics_port = _free_ports()
    flags = (f"--rpc_port={port}", f"--metrics_port={metrics_port}", "--rpc_address=127.0.0.1")
    process = subprocess.Popen(
        [command, *flags, "--metrics_host=127.0.0.1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"mooncake://127.0.0.1:{port}?segment={segment}"
    finally:
        process.kill()
        process.wait()


def _free_ports() -> tuple[int, int]:
    with closing(socket.socket()) as one, closing(socket.socket()) as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
