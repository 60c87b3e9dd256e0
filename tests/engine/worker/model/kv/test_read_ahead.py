"""Contents that are read while their request waits: bounded, given once, dropped with it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.kv_store import Bytes
from engine.step import RequestId
from engine.worker.model.kv.disk_pool import DiskFiles
from engine.worker.model.kv.read_ahead import ReadAheadBuffer

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))
ONE, OTHER = RequestId(1), RequestId(2)


class Slow:
    """Reads that wait until they may go on."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.names: list[bytes] = []

    def read(self, slot: int, name: bytes) -> Bytes | None:
        self.names.append(name)
        self.may_go_on.wait(10)
        return np.full(3, slot, np.uint8)


@pytest.fixture
def slow() -> Iterator[Slow]:
    found = Slow()
    yield found
    found.may_go_on.set()


def test_a_content_is_given_once(slow: Slow) -> None:
    slow.may_go_on.set()
    buffer = ReadAheadBuffer(slow.read, 4)
    buffer.begin(ONE, [(5, A)])
    while not slow.names:
        pass
    found = buffer.take(A)
    assert found is not None
    assert found.tolist() == [5, 5, 5]
    assert buffer.take(A) is None
    buffer.close()


def test_what_no_thread_has_begun_to_read_is_left_to_the_caller(slow: Slow) -> None:
    buffer = ReadAheadBuffer(slow.read, 4)
    buffer.begin(ONE, [(1, A), (2, B), (3, C)])
    while len(slow.names) < 2:
        pass
    assert buffer.take(C) is None
    slow.may_go_on.set()
    assert buffer.take(A) is not None
    buffer.close()
    assert C not in slow.names


def test_contents_are_bounded_and_dropped_with_their_request(slow: Slow) -> None:
    slow.may_go_on.set()
    buffer = ReadAheadBuffer(slow.read, 2)
    buffer.begin(ONE, [(1, A), (2, B), (3, C)])
    buffer.begin(OTHER, [(3, C)])
    assert len(buffer) == 2
    buffer.drop(OTHER)
    assert len(buffer) == 2
    buffer.drop(ONE)
    assert len(buffer) == 0
    buffer.close()


def test_the_disk_is_not_read_again_for_what_was_read_ahead(tmp_path: Path) -> None:
    files = DiskFiles(tmp_path, 4, 3)
    files.write(1, A, np.full(3, 7, np.uint8))
    files.wait()
    files.read_ahead(ONE, [(1, A), (2, B)])
    while not all(one.future.done() for one in files.ahead._contents.values()):
        pass
    files.write(1, C, np.full(3, 9, np.uint8))  # the slot has another content now
    files.wait()
    found, missing = files.read([1, 2], [A, B])
    assert found is not None
    assert found.tolist() == [7, 7, 7]
    assert missing is None
    files.read_ahead(ONE, [])
    files.close()
