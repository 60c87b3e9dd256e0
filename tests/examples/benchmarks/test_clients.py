import json
import sys

import pydantic
import pytest

from examples.benchmarks.server import client_calls
from examples.benchmarks.server.client_calls import Operations
from tests.examples.benchmarks.published import read


def fake(url: str) -> Operations:
    async def waited() -> str:
        return url

    def fails() -> None:
        raise ValueError("no\nsecond line")

    yield "waits", waited
    yield "fails", fails
    yield "finds nothing", list


def test_an_operation_has_passed_if_something_came_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(client_calls.CLIENTS, "pydantic", fake)
    monkeypatch.setattr(sys, "argv", ["client_calls.py", "pydantic", "http://127.0.0.1:1"])
    client_calls.main()
    row = json.loads(capsys.readouterr().out)
    assert (row["client"], row["version"]) == ("pydantic", pydantic.VERSION)
    assert [(each["passed"], each["why"]) for each in row["operations"]] == [
        (True, ""),
        (False, "ValueError: no"),
        (False, "nothing came back"),
    ]


def test_every_failure_has_a_reason_and_every_client_a_version_and_a_command() -> None:
    found = read("clients/clients.json")
    tried = [each for client in found["clients"] for each in client["operations"]]
    assert all(each["passed"] or each["why"] for each in tried)
    assert all(client["version"] and client["command"] for client in found["clients"])
