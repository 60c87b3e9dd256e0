"""The client of the comparison: opens chat streams and counts tokens as they come.

    python -m examples.benchmarks.server.front_ends.client PORT STREAMS SECONDS

Prints "begin" when every stream has had a token and `SETTLE` seconds have passed, "end" `SECONDS`
later, and then the counts as JSON. Every token has the text `WORD`, so that merged tokens are
counted, too.
"""

import asyncio
import gc
import json
import sys
import time
from typing import cast

import uvloop

MODEL = "m"
WORD = b" the"
EVENT = b"data: {"
MAX_TOKENS = 3000  # more than a stream gets before the measurement ends
SETTLE = 1.0
BODY = json.dumps(
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say it again and again."}],
        "stream": True,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n" % len(BODY)
) + BODY


class Count:
    """What all streams have received since the measurement began."""

    def __init__(self) -> None:
        self.began = float("inf")
        self.tokens = self.events = self.started = 0
        self.gaps: list[float] = []  # seconds between two arrivals of tokens in a stream


class Stream(asyncio.Protocol):
    """Sends the request and counts tokens in what comes, without parsing it."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._tail = b""  # may be the beginning of a token
        self._last = 0.0  # when a token came

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(REQUEST)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server rejects the request: {data[:300]!r}")
        data = self._tail + data
        self._tail = data[1 - len(WORD) :]
        if not (tokens := data.count(WORD)):
            return
        count = self._count
        if not self._last:
            count.started += 1
        elif now >= count.began:
            count.tokens += tokens
            count.events += data.count(EVENT)
            count.gaps.append(now - self._last)
        self._last = now


async def main(port: int, num_streams: int, seconds: float) -> None:
    loop, count = asyncio.get_running_loop(), Count()
    gc.disable()
    for _ in range(num_streams):
        await loop.create_connection(lambda: Stream(count), "127.0.0.1", port)
    while count.started < num_streams:  # noqa: ASYNC110 # a benchmark may poll
        await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLE)
    print("begin", flush=True)
    cpu = time.process_time()
    count.began = time.perf_counter()
    await asyncio.sleep(seconds)
    wall, cpu = time.perf_counter() - count.began, time.process_time() - cpu
    print("end", flush=True)
    count.began = float("inf")
    gaps = sorted(count.gaps)
    found = {
        "tokens_per_second": count.tokens / wall,
        "tokens_per_event": count.tokens / count.events,
        "gap_p50": gaps[len(gaps) // 2],
        "gap_p99": gaps[len(gaps) * 99 // 100],
        "client_busy": cpu / wall,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
