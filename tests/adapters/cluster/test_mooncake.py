"""Mooncake Store: its contents, what a store that is down or slow costs, and its URL. Tests with a
real `mooncake_master` skip where the package does not load."""

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.cluster import mooncake
from adapters.cluster.mooncake import MooncakeStore, StoreOptions
from engine.errors import StartupError
from engine.worker.model.kv.disk_pool import DiskFiles
from tests.contracts.kv_store import SIZE, A, B, check_store, content
from tests.mooncake_master import running_master

OPTIONS = StoreOptions("127.0.0.1:1")


class Client:
    """Mooncake's client over a dict."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.error = 0
        self.num_calls = 0

    def put(self, key: str, value: bytes) -> int:
        self._call()
        if not self.error:
            self.objects.setdefault(key, value)
        return self.error

    def get(self, key: str) -> bytes:
        self._call()
        return self.objects.get(key, b"")

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self._call()
        return [self.error or int(key in self.objects) for key in keys]

    def close(self) -> int:
        return 0

    def _call(self) -> None:
        self.num_calls += 1
        self.may_answer.wait(10)


@pytest.fixture
def client() -> Iterator[Client]:
    found = Client()
    yield found
    found.may_answer.set()


def store_over(client: Client, keys: str = "model") -> MooncakeStore:
    return MooncakeStore(OPTIONS, keys, lambda: client)


def test_the_contract_holds_for_files_and_for_the_store(tmp_path: Path, client: Client) -> None:
    check_store(lambda: DiskFiles(tmp_path, 4, SIZE))
    check_store(lambda: store_over(client))


def test_another_model_finds_nothing(client: Client) -> None:
    store, other = store_over(client), store_over(client, "other")
    store.write(0, A, content(1))
    store.wait()
    assert store.exists([A, B]) == [True, False]
    assert other.exists([A, B]) == [False, False]
    assert other.read([0], [A]) == [None]
    store.close()
    other.close()


@pytest.mark.parametrize("change", ["cut", "changed", "of another name", "empty"])
def test_an_object_that_is_not_whole_is_not_there(client: Client, change: str) -> None:
    store = store_over(client)
    for name in (A, B):
        store.write(0, name, content(1))
    store.wait()
    key, other = store._key(A), store._key(B)
    raw = client.objects[key]
    client.objects[key] = {
        "cut": raw[:-1],
        "changed": raw[:-1] + bytes([raw[-1] ^ 1]),
        "of another name": client.objects[other],
        "empty": raw[:20],
    }[change]
    assert store.read([0], [A]) == [None]
    store.close()


def test_a_store_that_does_not_answer_is_given_up_and_then_not_called(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mooncake, "CALL_SECONDS", 0.02)
    store = store_over(client)
    client.may_answer.clear()
    assert store.exists([A]) is None
    assert store.is_paused
    num_calls = client.num_calls
    assert store.exists([A]) is None
    assert store.read([0, 0], [A, B]) == [None, None]
    store.write(0, A, content(1))
    client.may_answer.set()
    store.wait()
    assert client.num_calls == num_calls
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "--kv-store 127.0.0.1:1: no answer within 0.02 s; not used for" in caplog.text
    monkeypatch.setattr(store, "_paused_until", 0.0)
    monkeypatch.setattr(mooncake, "CALL_SECONDS", 5.0)
    assert store.exists([A]) == [False]
    store.close()


def test_a_master_that_cannot_be_reached_pauses_the_store(client: Client) -> None:
    store = store_over(client)
    client.error = -900
    assert store.exists([A]) is None
    assert store.is_paused
    store.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"127.0.0.1:{port}"
    dead = MooncakeStore(OPTIONS, "model", lambda: mooncake._set_up(Client(), StoreOptions(url), 0))
    assert dead.read([0], [A]) == [None]
    assert dead.is_paused
    dead.close()


def test_contents_that_the_store_does_not_take_in_time_are_dropped(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "MAX_QUEUED_BYTES", SIZE)
    store = store_over(client)
    client.may_answer.clear()
    store.write(0, A, content(1))
    store.write(0, B, content(2))
    client.may_answer.set()
    store.wait()
    assert store.exists([A, B]) == [True, False]
    store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mooncake://host", "expected mooncake://HOST:PORT"),
        ("mooncake://host:1/path", "expected mooncake://HOST:PORT"),
        ("mooncake://host:1?size=3", "unknown option size; known: metadata, protocol"),
        ("mooncake://host:1?protocol=udp", "protocol must be tcp or rdma, not 'udp'"),
        ("mooncake://host:1?segment=big", "segment must be a size as 512MiB, not 'big'"),
    ],
)
def test_a_wrong_url_is_rejected_with_the_part(url: str, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        StoreOptions.parse(url)
    assert message in str(caught.value)


def test_a_url_has_the_address_and_options() -> None:
    found = StoreOptions.parse(
        "mooncake://10.0.0.1:50051?segment=2GiB&protocol=rdma&devices=mlx5_0"
    )
    assert found == StoreOptions(
        "10.0.0.1:50051", protocol="rdma", devices="mlx5_0", segment_bytes=2 << 30
    )


@pytest.fixture
def master() -> Iterator[str]:
    """The URL of a real store on this machine."""
    with running_master() as url:
        yield url


@pytest.mark.process
def test_the_contract_holds_for_a_real_store(master: str) -> None:
    keeper = MooncakeStore.open(master, "contract", lends_memory=True)  # has the memory
    assert keeper.exists([A]) == [False]
    check_store(lambda: MooncakeStore.open(master, "contract", lends_memory=False))
    assert keeper.exists([A, B]) == [True, True]
    keeper.close()
