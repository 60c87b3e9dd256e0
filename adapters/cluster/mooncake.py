"""Mooncake Store: KV blocks in the memory of a cluster, shared by the servers of one model.

    --kv-store mooncake://MASTER:50051?protocol=tcp&segment=512MiB

`MASTER:50051` is the address of `mooncake_master`. Each object has the content of one block or
snapshot behind a header with its name and checksum, as on disk. Its key begins with a digest of all
that the content depends on. Objects do not change; Mooncake evicts them when its memory is full.

All calls are made by two daemon threads, one that reads and one that writes. A call that fails, or
takes longer than `CALL_SECONDS`, opens a circuit breaker: for `PAUSE_SECONDS` the store is not
called, and nothing is found in it. The client's `setup` keeps the interpreter lock while it tries
to reach the master, so it is called only when the master's port accepts connections.
"""

import ctypes
import importlib
import importlib.util
import logging
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

import numpy as np

from engine.errors import StartupError
from engine.kv_store import MAX_NAMES, Bytes

logger = logging.getLogger(__name__)

FLAG = "--kv-store"
INSTALL = "pip install 'podway[mooncake]'"
CALL_SECONDS = 1.0
READ_SECONDS = 4.0  # for all contents that one step loads
CONNECT_SECONDS = 1.0
PAUSE_SECONDS = 10.0
FLUSH_SECONDS = 10.0
MAX_QUEUED_BYTES = 256 << 20  # waiting to be written; contents beyond that are not
LOCAL_BUFFER_BYTES = 256 << 20  # a client's buffer for transfers
DEFAULT_SEGMENT_BYTES = 512 << 20
UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
PROTOCOLS = ("tcp", "rdma")
HEADER = np.dtype([("name", "V16"), ("checksum", "<u4")])

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What the URL says."""

    master: str  # host:port
    metadata: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    devices: str = ""
    host: str = ""  # this machine's name or address, as others reach it
    segment_bytes: int = DEFAULT_SEGMENT_BYTES

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises `StartupError` with the part that is wrong."""
        parts = urlsplit(url)
        fields = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "mooncake" or not parts.hostname or port is None or parts.path:
            raise StartupError(f"{FLAG} {url}: expected mooncake://HOST:PORT?option=value")
        unknown = fields.keys() - {"metadata", "protocol", "devices", "host", "segment"}
        if unknown:
            known = "metadata, protocol, devices, host, segment"
            raise StartupError(f"{FLAG}: unknown option {min(unknown)}; known: {known}")
        protocol = fields.get("protocol", "tcp")
        if protocol not in PROTOCOLS:
            raise StartupError(f"{FLAG}: protocol must be tcp or rdma, not {protocol!r}")
        return cls(
            master=f"{parts.hostname}:{port}",
            metadata=fields.get("metadata", "P2PHANDSHAKE"),
            protocol=protocol,
            devices=fields.get("devices", ""),
            host=fields.get("host", ""),
            segment_bytes=_num_bytes(fields.get("segment", "512MiB")),
        )


class MooncakeStore:
    """A `SharedStore`."""

    def __init__(self, options: StoreOptions, keys: str, client: Callable[[], Any]) -> None:
        """`client` connects to the store; it may raise `OSError`, and is called again later."""
        self.options = options
        self._keys = keys
        self._connect = client
        self._client: Any = None
        self._lock = threading.Lock()
        self._paused_until = 0.0
        self._num_queued_bytes = 0
        self._reader, self._writer = _Thread("kv-store-read"), _Thread("kv-store-write")
        self._written: Future[None] | None = None

    @classmethod
    def open(cls, url: str, keys: str, *, lends_memory: bool) -> Self:
        """See `SharedStore`."""
        options = StoreOptions.parse(url)
        store_class = _load_client()
        segment = options.segment_bytes if lends_memory else 0
        store = cls(options, keys, lambda: _set_up(store_class(), options, segment))
        store.exists([bytes(16)])  # connects
        return store

    @property
    def num_slots(self) -> int:
        return MAX_NAMES

    @property
    def is_paused(self) -> bool:
        """Whether the circuit breaker is open."""
        return time.monotonic() < self._paused_until

    def exists(self, names: Sequence[bytes]) -> Sequence[bool] | None:
        keys = [self._key(name) for name in names]
        codes = self._call(lambda client: client.batch_is_exist(keys))
        if codes is None or min(codes, default=0) < 0:
            if codes is not None:
                self._pause(f"error {min(codes)}")
            return None
        return [code == 1 for code in codes]

    def read(self, slots: Sequence[int], names: Sequence[bytes]) -> Sequence[Bytes | None]:
        deadline = time.monotonic() + READ_SECONDS
        found: list[Bytes | None] = []
        for name in names:
            raw = self._get(self._key(name)) if time.monotonic() < deadline else None
            found.append(None if raw is None else _content(name, raw))
        return found

    def _get(self, key: str) -> bytes | None:
        return self._call(lambda client: client.get(key))

    def write(self, slot: int, name: bytes, content: Bytes) -> None:
        size = content.nbytes
        with self._lock:
            if self.is_paused or self._num_queued_bytes + size > MAX_QUEUED_BYTES:
                return
            self._num_queued_bytes += size
        self._written = self._writer.submit(lambda: self._put(name, content))

    def wait(self) -> None:
        if self._written is not None:
            with suppress(TimeoutError):
                self._written.result(FLUSH_SECONDS)

    def close(self) -> None:
        self.wait()
        if self._client is not None:
            closed = self._writer.submit(self._client.close)
            with suppress(TimeoutError):
                closed.result(CALL_SECONDS)
        self._reader.end()
        self._writer.end()

    def _put(self, name: bytes, content: Bytes) -> None:
        raw = content.tobytes()
        try:
            if not self.is_paused:
                code = self._connected().put(self._key(name), _header(name, raw) + raw)
                if code <= RPC_FAILED:
                    self._pause(f"error {code}")
        except OSError as error:
            self._pause(str(error))
        finally:
            with self._lock:
                self._num_queued_bytes -= len(raw)

    def _call(self, call: Callable[[Any], T]) -> T | None:
        """The result of a call; None if the store is paused, fails or takes longer."""
        if self.is_paused:
            return None
        future = self._reader.submit(lambda: call(self._connected()))
        try:
            return future.result(CALL_SECONDS)
        except TimeoutError:
            future.cancel()
            self._pause(f"no answer within {CALL_SECONDS:g} s")
        except (OSError, RuntimeError) as error:
            self._pause(str(error))
        return None

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _pause(self, why: str) -> None:
        if not self.is_paused:
            logger.warning(
                "%s %s: %s; not used for %g s", FLAG, self.options.master, why, PAUSE_SECONDS
            )
        self._paused_until = time.monotonic() + PAUSE_SECONDS

    def _key(self, name: bytes) -> str:
        return f"podway-{self._keys}-{name.hex()}"


RPC_FAILED = -900  # Mooncake's error codes from here on: the master cannot be reached


class _Thread:
    """A daemon thread that makes calls in order, so that a call that hangs keeps no process."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except Exception as error:  # the caller of `result` gets it
                future.set_exception(error)

        self._calls.put(run)
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _header(name: bytes, content: bytes) -> bytes:
    return np.array((name, zlib.crc32(content)), HEADER).tobytes()


def _content(name: bytes, raw: bytes) -> Bytes | None:
    """The content of an object; None if it is not whole, or is another one."""
    content = raw[HEADER.itemsize :]
    if len(raw) <= HEADER.itemsize or raw[: HEADER.itemsize] != _header(name, content):
        return None
    return np.frombuffer(content, np.uint8)


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]iB)?", text, re.IGNORECASE)
    if match is None:
        raise StartupError(f"{FLAG}: segment must be a size as 512MiB, not {text!r}")
    return int(match[1]) * UNITS[(match[2] or "").upper()]


def _load_client() -> Any:
    """The client class. Raises `StartupError` if its package does not load."""
    runtime = importlib.util.find_spec("nvidia.cuda_runtime") if _has_nvidia() else None
    for folder in runtime.submodule_search_locations or () if runtime else ():
        for library in sorted(Path(folder).glob("lib/libcudart.so.*")):  # its wheel links to it
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ.setdefault("GLOG_minloglevel", "2")  # errors only, unless the operator wants more
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except (ImportError, OSError) as error:
        raise StartupError(f"{FLAG} needs Mooncake ({INSTALL}): {error}") from None


def _has_nvidia() -> bool:
    return importlib.util.find_spec("nvidia") is not None


def _set_up(client: Any, options: StoreOptions, segment_bytes: int) -> Any:
    """Connect the client. Raises `OSError` if the master cannot be reached."""
    host, _, port = options.master.rpartition(":")
    with socket.create_connection((host, int(port)), CONNECT_SECONDS) as probe:
        own_host = options.host or probe.getsockname()[0]
    code = client.setup(
        own_host,
        options.metadata,
        segment_bytes,
        LOCAL_BUFFER_BYTES,
        options.protocol,
        options.devices,
        options.master,
    )
    if code:
        raise OSError(f"the client of the store could not be set up (error {code})")
    return client
