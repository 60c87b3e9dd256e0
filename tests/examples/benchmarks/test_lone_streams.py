from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from examples.benchmarks.peers import lone_streams
from examples.benchmarks.peers.servers import Server


def server(name: str) -> Server:
    return Server(name, "int8", ("serve",), 1, "m", {})


def test_answers_of_all_servers_take_turns_and_a_round_is_compared_with_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    up, answers = set[str](), list[str]()

    @contextmanager
    def running(server: Server) -> Iterator[Any]:
        up.add(server.name)
        yield SimpleNamespace(url=server.name)
        up.remove(server.name)

    def seconds_per_token(url: str, num_tokens: int) -> float:
        answers.append(url)
        assert len(answers) < 3 or up == {"ours", "theirs"}
        return (0.1 if url == "ours" else 0.2) * len(answers)  # the memory becomes slower

    monkeypatch.setattr(lone_streams, "running", running)
    monkeypatch.setattr(lone_streams, "seconds_per_token", seconds_per_token)
    monkeypatch.setattr(lone_streams, "PAUSE", 0.0)
    reads: Any = SimpleNamespace(seconds=lambda num_bytes: num_bytes / 50e9)
    rows = lone_streams.measure([server("ours"), server("theirs")], reads, 2, 96)
    assert answers[2:] == ["ours", "theirs", "theirs", "ours"]
    assert not up
    last = lone_streams.page({"cpu": "", "cores": 2, "rows": rows}).splitlines()[-1]
    assert last == "| int8: theirs | 2 | 1.1 (1.0–1.2) | 0.49 (0.38–0.60) | 50 (50–50) |"
