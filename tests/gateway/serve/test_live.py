"""A real port: the official client, broken HTTP, clients that disconnect, and shutdown."""

import asyncio
import gc
import json
import socket
import threading
from collections.abc import Callable, Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from engine.request import Abort
from tests.gateway.rig import MODEL, Setting
from tests.gateway.serve.live import Live, listening

TEXT = "Grüße aus dem Süden 🙂 "
LONG = TEXT * 5
STEP = 0.002
HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def live() -> Iterator[Live]:
    with listening(Setting(texts=(TEXT,), step=STEP)) as server:
        yield server


@pytest.fixture
def endless() -> Iterator[Live]:
    """Its answers end at the context's edge, some seconds later."""
    with listening(Setting(texts=(LONG,), step=0.05), drain_seconds=0.0) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client


def test_the_official_client_gets_a_reply(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=HI)
    assert reply.choices[0].message.content == TEXT
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(TEXT.encode()) + 1
    assert reply._request_id is not None


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == TEXT
    assert chunks[-1].usage is not None


def test_the_official_streaming_helper_gathers_the_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HI) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        completion = stream.get_final_completion()
    assert "".join(deltas) == TEXT
    assert completion.choices[0].message.content == TEXT
    assert completion.choices[0].finish_reason == "stop"


def test_the_official_async_client_runs_many_at_once(live: Live) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url, api_key="any") as client:
            calls = (
                client.completions.create(model=MODEL, prompt="x", max_tokens=99) for _ in "12345"
            )
            return [reply.choices[0].text for reply in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == [TEXT] * 5


def test_the_official_client_lists_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/nothing")


def test_the_official_client_raises_the_error_of_a_stream_that_fails(endless: Live) -> None:
    with openai.OpenAI(base_url=endless.url, api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        next(iter(stream))
        endless.stop()
        with pytest.raises(openai.APIError, match="shut down"):
            list(stream)


def test_a_client_that_disconnects_is_noticed_streaming_or_not(endless: Live) -> None:
    ended, pool = endless.rig.ended, endless.rig.engine.scheduler.pool
    for count, stream in enumerate((True, False), 1):
        with endless.connect() as peer:
            peer.sendall(a_request(stream=stream))
            wait_until(endless, lambda count=count: len(ended) + len(pool) == count)  # type: ignore[misc] # bound now
            if stream:
                peer.recv(1)
    wait_for_end(endless, 2)
    assert [request.abort for request in endless.rig.ended] == [Abort.CLIENT_GONE] * 2
    assert endless.rig.metrics.requests.cancel_to_free.sum <= 2


def wait_for_end(live: Live, count: int = 1) -> None:
    """Wait until so many requests have ended and none is live."""
    wait_until(live, lambda: not live.rig.engine.scheduler.pool and len(live.rig.ended) >= count)


def wait_until(live: Live, is_so: Callable[[], object]) -> None:
    """Wait until it is so, asked in the loop's thread."""
    done = threading.Event()

    async def watch() -> None:
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        done.set()

    asyncio.run_coroutine_threadsafe(watch(), live.loop)
    assert done.wait(20)


def a_request(**fields: object) -> bytes:
    body = json.dumps({"model": MODEL, "messages": HI, **fields}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += "content-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"this is no http\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 400_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n",
            413,
        ),
    ],
)
def test_broken_http_gets_json_and_the_connection_is_closed(
    live: Live, sent: bytes, status: int
) -> None:
    with live.connect() as peer:
        peer.sendall(sent)
        answer = b""
        while piece := receive(peer):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def receive(peer: socket.socket) -> bytes:
    """What comes next; a reset ends it as well, since we may not have finished sending."""
    try:
        return peer.recv(65536)
    except ConnectionResetError:
        return b""


def test_a_chunked_body_is_stopped_at_the_limit(live: Live) -> None:
    with live.connect() as peer:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-type: application/json\r\n"
        peer.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(17):
            peer.sendall(chunk)
        assert receive(peer).startswith(b"HTTP/1.1 413 ")


def test_a_drain_lets_running_answers_finish(live: Live) -> None:
    with openai.OpenAI(base_url=live.url, api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        first = next(iter(stream))
        live.stop()
        rest = list(stream)
    said = "".join(c.choices[0].delta.content or "" for c in (first, *rest))
    assert said == TEXT


def test_while_it_drains_its_clients_are_told_to_use_other_connections() -> None:
    def health(peer: socket.socket) -> bytes:
        peer.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        response = receive(peer)
        while not response.endswith(b'{"status":"ok"}'):
            part = receive(peer)
            assert part, response
            response += part
        return response

    with (
        listening(Setting(texts=(LONG,), step=0.05)) as server,
        server.connect() as running,
        server.connect() as peer,
    ):
        running.sendall(a_request(stream=True))
        receive(running)
        assert b"connection: close" not in health(peer)
        server.stop()
        while b"connection: close" not in health(peer):
            pass
        assert receive(peer) == b""


def test_requests_leave_no_garbage_that_only_the_collector_frees(live: Live) -> None:
    """Its memory would stay for long: the server collects rarely, see `tune_collector`."""
    rejected = b"GET /v1/nothing HTTP/1.1\r\nhost: localhost\r\n\r\n"
    served = a_request(max_tokens=1)
    exchange(live, served, rejected)
    gc.collect()
    gc.disable()
    try:
        exchange(live, *[served, rejected] * 20)
        assert gc.collect() < 20 * 10
    finally:
        gc.enable()


def exchange(live: Live, *requests: bytes) -> None:
    """Send each over a connection of its own, and wait for the first bytes of the response."""
    for request in requests:
        with live.connect() as peer:
            peer.sendall(request)
            assert peer.recv(100).startswith(b"HTTP/1.1 ")
