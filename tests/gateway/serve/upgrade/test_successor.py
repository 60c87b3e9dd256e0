import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, patch

import pytest

from engine.errors import StartupError
from gateway.observe.kv_events import KVEventsConfig
from gateway.serve.assemble import beside_former
from gateway.serve.upgrade.channel import private_socket
from gateway.serve.upgrade.successor import Successor, Upgrades, without_secrets
from gateway.settings.server import ObserveSettings
from gateway.settings.settings import Settings


class FakeSuccessor:
    """Answers at once. When it takes over, it asks the former server about one of its streams."""

    def __init__(self, *, takes_over: bool) -> None:
        self.channel = MagicMock()
        self.process = MagicMock(pid=1)
        self.asked: list[socket.socket] = []
        self._takes_over = takes_over

    async def expect(self, what: str, seconds: float) -> None:
        if what == "taken":
            self.asked.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self.asked[-1].connect(private_socket(os.getpid()))
            if not self._takes_over:
                raise StartupError("it has ended")


def no_store() -> Any:
    async def is_lost_at_end() -> bool:
        return False

    return SimpleNamespace(is_lost_at_end=is_lost_at_end, database=SimpleNamespace(path=None))


async def handed_over(successor: FakeSuccessor) -> tuple[Upgrades, list[str]]:
    accepts: list[str] = []
    upgrades = Upgrades(no_store(), 1.0, lambda: None)
    acceptor: Any = SimpleNamespace(
        pause=lambda: accepts.append("pause"), resume=lambda: accepts.append("resume")
    )
    with patch("gateway.serve.upgrade.successor.adopt_descendants"):
        await upgrades._hand_over(cast("Successor", successor), acceptor)
    return upgrades, accepts


async def test_a_successor_is_answered_about_streams_as_soon_as_it_takes_over() -> None:
    successor = FakeSuccessor(takes_over=True)
    upgrades, accepts = await handed_over(successor)
    assert accepts == ["pause"]
    assert upgrades.private is not None
    answering, _ = upgrades.private.accept()
    for each in (answering, upgrades.private, *successor.asked):
        each.close()


async def test_a_handover_that_fails_can_be_tried_again() -> None:
    for _ in range(2):
        successor = FakeSuccessor(takes_over=False)
        with pytest.raises(StartupError):
            await handed_over(successor)
        for each in successor.asked:
            each.close()
    upgrades, _ = await handed_over(successor := FakeSuccessor(takes_over=True))
    assert upgrades.private is not None
    for each in (upgrades.private, *successor.asked):
        each.close()


ENDING = """
import asyncio, pathlib, sys
from gateway.serve.upgrade.inherited import Inherited
from gateway.serve.upgrade.channel import Predecessor

record = pathlib.Path(sys.argv[1])
predecessor = asyncio.run(Predecessor.join(Inherited.from_environment(), [record]))
record.write_text("{}")
"""


async def test_the_recording_of_a_successor_that_ends_before_it_is_ready_is_removed(
    tmp_path: Path,
) -> None:
    record = tmp_path / "run.1.jsonl"
    with socket.socket() as listener:
        successor = await Successor.start([sys.executable, "-c", ENDING, str(record)], listener)
        upgrades = Upgrades(no_store(), 60.0, lambda: None)
        with pytest.raises(StartupError, match="ended with exit code 0"):
            await upgrades._hand_over(successor, MagicMock())
        assert record.exists()
        successor.kill()
    assert not record.exists()


def test_two_servers_do_not_publish_the_events_of_two_caches_as_one() -> None:
    events = KVEventsConfig(enable_kv_cache_events=True)
    settings = Settings(observe=ObserveSettings(kv_events_config=events))
    with pytest.raises(StartupError, match="--kv-events-config cannot be upgraded"):
        beside_former(settings)


def test_the_logged_command_has_no_api_keys() -> None:
    flags = ["--api-key", "sk-1", "--port", "8000", "--admin-api-key=ops=sk-2", "--api-key=sk-3"]
    shown = "podway serve --api-key … --port 8000 --admin-api-key=… --api-key=…"
    assert without_secrets(["podway", "serve", *flags]) == shown
