"""What tests of processes check when they end."""

import gc
import os
from collections.abc import Iterator

import psutil
import pytest
import uvloop


def open_fds() -> set[str]:
    return {f"{fd}" for fd in os.listdir("/proc/self/fd")}


@pytest.fixture
def no_process_or_file_descriptor_is_left() -> Iterator[None]:
    uvloop.new_event_loop().close()  # the first one opens a pipe for the whole process
    gc.collect()  # closes what tests before this one have left
    children, fds = psutil.Process().children(), open_fds()
    yield
    assert psutil.Process().children() == children
    assert open_fds() == fds
