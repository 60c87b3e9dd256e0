import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.control.event_recorder import RecordingHeader, Row
from engine.control.settings import SchedulerSettings
from engine.cost.model import CostModel
from engine.errors import StartupError
from engine.kv_shape import KVShape
from engine.policy import PolicySettings
from engine.simulated.replay import read_recording
from gateway.observe import recording as module
from gateway.observe.recording import RecordingFile, recording

COST = CostModel.linear(0.5, 0.125, 0.0)
HEADER = RecordingHeader("fcfs", PolicySettings(), SchedulerSettings(64), KVShape(10, 4), 1, COST)


class Blocks:
    """The blocks of a prompt, whose hashes the recording's thread computes."""

    def hashes(self) -> list[bytes]:
        return [b"x"]


def rows(count: int) -> Iterator[Row]:
    for number in range(count):
        row = {"at": number / 2, "arrived": number, "prompt": 9, "max_tokens": 5}
        yield row | {"blocks": Blocks()}


def test_every_row_is_in_the_file_in_order_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    with recording(path, HEADER) as scribe:
        for row in rows(5000):
            scribe._write(row)
    read = read_recording(path)
    assert read.header == HEADER
    assert [row.arrived for row in read.rows] == list(range(5000))


def test_equal_content_has_equal_hashes_within_one_recording_only(tmp_path: Path) -> None:
    names = []
    for path in (tmp_path / "a", tmp_path / "b"):
        with recording(path, HEADER) as scribe:
            for row in rows(2):
                scribe._write(row)
        written = map(json.loads, path.read_text().splitlines()[1:])
        names.append({line["blocks"][0] for line in written})
    assert [len(found) for found in names] == [1, 1]
    assert names[0] != names[1]


def test_a_recording_that_cannot_be_created_is_rejected_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(StartupError, match="cannot write the recording"),
        recording(tmp_path / "none" / "record.jsonl", HEADER),
    ):
        pass


def test_a_full_disk_ends_the_recording_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "record.jsonl"
    path.symlink_to("/dev/full")
    if not os.path.exists("/dev/full"):
        pytest.skip("no disk here is always full")
    with caplog.at_level(logging.ERROR), recording(path, HEADER) as scribe:
        for row in rows(20_000):
            scribe._write(row)
    assert [record.getMessage() for record in caplog.records] == [
        f"the recording {path} has stopped: No space left on device"
    ]


class Stuck(io.StringIO):
    """A file on a disk that waits for something."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        assert self.goes_on.wait(60)
        return super().write(text)


def test_a_disk_that_does_not_keep_up_ends_the_recording_before_memory_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG", 100)
    file = Stuck()
    record = RecordingFile(file, Path("record.jsonl"))
    with caplog.at_level(logging.ERROR):
        for row in rows(2000):
            record.put(row)
    file.goes_on.set()
    record.close()
    assert [entry.getMessage() for entry in caplog.records] == [
        "the recording record.jsonl has stopped: the disk does not keep up"
    ]
