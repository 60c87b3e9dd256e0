"""A real `mooncake_master` on this machine; tests skip where its package does not load."""

import shutil
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from adapters.cluster import mooncake
from engine.errors import StartupError
from examples.benchmarks.cluster import shared_store


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


def running_master(segment: str = "64MiB") -> AbstractContextManager[str]:
    """The URL of a store whose clients lend so much memory."""
    return shared_store.running_master(segment, need_mooncake())
