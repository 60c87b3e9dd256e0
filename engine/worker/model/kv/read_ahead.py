"""ReadAheadBuffer: copies that are read into host memory while their request waits."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from engine.kv_store import Bytes
from engine.step import RequestId

THREADS = 2


class _Content(NamedTuple):
    request_id: RequestId
    future: "Future[Bytes | None]"


class ReadAheadBuffer:
    """The contents, by name, that threads read or have read. A content belongs to the request for
    which it was read first, and is given once."""

    def __init__(self, read: Callable[[int, bytes], Bytes | None], most: int) -> None:
        """`read` gives the content of a slot, None if it does not have that name. At most `most`
        contents are in memory; what is beyond is not read ahead."""
        self._read = read
        self._most = most
        self._contents: dict[bytes, _Content] = {}
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="disk-kv-ahead")

    def __len__(self) -> int:
        return len(self._contents)

    def begin(self, request_id: RequestId, copies: Iterable[tuple[int, bytes]]) -> None:
        """Read these slots with these names; does not wait."""
        with self._lock:
            for slot, name in copies:
                if len(self._contents) >= self._most:
                    return
                if name not in self._contents:
                    future = self._threads.submit(self._read, slot, name)
                    self._contents[name] = _Content(request_id, future)

    def take(self, name: bytes) -> Bytes | None:
        """The content, once it is read; None if it is not read ahead, or not readable."""
        with self._lock:
            found = self._contents.pop(name, None)
        if found is None or found.future.cancel():  # no thread has begun to read it
            return None
        return found.future.result()

    def drop(self, request_id: RequestId) -> None:
        """The request has ended: what was read for it is not needed."""
        with self._lock:
            mine = [name for name, one in self._contents.items() if one.request_id == request_id]
            for name in mine:
                self._contents.pop(name).future.cancel()

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)
