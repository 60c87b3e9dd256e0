"""Requests that are slow on purpose, on a real engine: the explanation names the right cause."""

import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import read_url, start_server

LONG = {"max_tokens": 2000, "ignore_eos": True}


def complete(url: str, name: str, **fields: Any) -> None:
    body = {"model": "builtin", "prompt": f"{name}: once upon a time", **fields}
    headers = {"x-request-id": name}
    response = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text


def explanation(url: str, name: str) -> str:
    found = httpx.get(f"{url}/v1/requests/{name}/timeline").json()
    return str(found["explanation"])


class Crowd:
    """Requests that are sent at once, in threads."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._threads = ThreadPoolExecutor(16)
        self._futures: list[Future[None]] = []

    def send(self, name: str, **fields: Any) -> None:
        self._futures.append(self._threads.submit(complete, self._url, name, **fields))

    def wait_for_running(self, count: int) -> None:
        """Wait until so many requests hold KV."""
        until = time.monotonic() + 60
        while self._running() < count:
            assert time.monotonic() < until
            time.sleep(0.01)

    def _running(self) -> int:
        page = httpx.get(f"{self._url}/v1/loads").json()
        running: int = page["loads"][0]["num_running_reqs"]
        return running

    def finish(self) -> None:
        for future in self._futures:
            future.result(120)


def served(directory: Path, *flags: str) -> Iterator[str]:
    with start_server(directory, "--no-prefix-cache", *flags) as child:
        yield read_url(child)


@pytest.fixture
def without_kv(tmp_path: Path) -> Iterator[str]:
    yield from served(tmp_path, "--kv-slots", "2112", "--admission", "reserve")


@pytest.fixture
def with_one_seat(tmp_path: Path) -> Iterator[str]:
    yield from served(tmp_path, "--max-batch-size", "1")


@pytest.fixture
def that_preempts(tmp_path: Path) -> Iterator[str]:
    yield from served(tmp_path, "--kv-slots", "2400")


@pytest.fixture
def that_swaps(tmp_path: Path) -> Iterator[str]:
    yield from served(tmp_path, "--kv-slots", "2400", "--host-kv-memory", "64MiB")


@pytest.fixture
def with_room(tmp_path: Path) -> Iterator[str]:
    yield from served(tmp_path)


def test_no_kv(without_kv: str) -> None:
    crowd = Crowd(without_kv)
    crowd.send("first", **LONG)
    crowd.wait_for_running(1)
    crowd.send("slow", max_tokens=200)
    crowd.finish()
    found = explanation(without_kv, "slow")
    assert " s for KV: 1 request held " in found
    assert "--kv-memory" in found


def test_a_long_queue(with_one_seat: str) -> None:
    crowd = Crowd(with_one_seat)
    crowd.send("first", **LONG)
    crowd.wait_for_running(1)
    for number in range(3):
        crowd.send(f"before-{number}", max_tokens=200, ignore_eos=True)
    crowd.send("slow", max_tokens=20)
    crowd.finish()
    found = explanation(with_one_seat, "slow")
    assert " s for a seat: " in found
    assert "--max-batch-size" in found


def test_preempted(that_preempts: str) -> None:
    crowd = Crowd(that_preempts)
    crowd.send("first", **LONG)
    crowd.wait_for_running(1)
    crowd.send("slow", **LONG)
    crowd.finish()
    found = explanation(that_preempts, "slow")
    assert found.startswith("It was preempted ")
    assert "--host-kv-memory" in found


def test_swapped(that_swaps: str) -> None:
    crowd = Crowd(that_swaps)
    crowd.send("first", **LONG)
    crowd.wait_for_running(1)
    crowd.send("slow", **LONG)
    crowd.finish()
    found = explanation(that_swaps, "slow")
    assert found.startswith("Its KV was swapped out ")
    assert "a larger --kv-memory" in found


def test_a_slow_reader(with_room: str) -> None:
    """A client with a small receive buffer, which does not read until the engine has finished."""
    body = {"model": "builtin", "prompt": "Once", "stream": True, "logprobs": 5, "n": 8, **LONG}
    encoded = json.dumps(body).encode()
    address = urllib.parse.urlsplit(with_room)
    assert address.hostname is not None
    assert address.port is not None
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: slow\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(encoded)}\r\n"
        client.sendall(f"{head}connection: close\r\n\r\n".encode() + encoded)
        until = time.monotonic() + 60
        while not all(choice["ended"] for choice in _timeline(with_room)["choices"]):
            assert time.monotonic() < until
            time.sleep(0.2)
        while "Its client did not read for " not in (found := explanation(with_room, "slow")):
            assert time.monotonic() < until, found
            _read_all(client)
    assert "the client or its network was slow, not the engine" in found


def _timeline(url: str) -> dict[str, Any]:
    """Of the request "slow"; it may not have arrived yet."""
    response = httpx.get(f"{url}/v1/requests/slow/timeline")
    found: dict[str, Any] = response.json()
    return found if response.status_code == 200 else {"choices": [{"ended": False}]}


def _read_all(client: socket.socket) -> None:
    """Everything that can be read without waiting for long."""
    client.settimeout(0.1)
    try:
        while client.recv(65536):
            pass
    except TimeoutError:
        return
