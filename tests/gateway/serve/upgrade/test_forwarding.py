import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from engine.request import Abort, State
from gateway.access.key_file import Allowance
from gateway.generation.restored_streams import restore_streams
from gateway.serve.upgrade import forwarding
from gateway.serve.upgrade.channel import private_listener, private_socket
from gateway.serve.upgrade.forwarding import (
    CLIENT,
    SECRET,
    Forwarding,
    PrivateApp,
    PrivateConnector,
)
from gateway.web.table import ROUTES
from tests.gateway.access.test_retries import check_superseded, content_of
from tests.gateway.rig import CHAT, MODEL, USER, Rig, Setting, build_rig, chat, play
from tests.gateway.scenes import plays
from tests.wire.asgi import Client, Exchange

if TYPE_CHECKING:
    from gateway.serve.upgrade.channel import Predecessor

RETRY = {"idempotency-key": "x"}
KEY = {"authorization": "Bearer a"}
STORY = "A story that is long enough."
LONG: dict[str, Any] = {"texts": ("A story. " * 20,), "step": 0.05}  # nine seconds
Scene = Callable[["Two"], Awaitable[None]]


class Two:
    """A former server, and its successor, which asks it over its private socket."""

    def __init__(self, former: Rig, own: Rig, socket: asyncio.Server | None = None) -> None:
        self.former = former
        self.own = own
        self.restored = asyncio.Event()
        predecessor = SimpleNamespace(restored=self.restored, pid=os.getpid(), secret="secret")
        app = Forwarding(own.app, own.service, cast("Predecessor", predecessor))
        self.client = Client(app)  # of the new server


@asynccontextmanager
async def served_privately(rig: Rig) -> AsyncIterator[None]:
    """Serve on the private socket of a former server."""
    app = PrivateApp(rig.app, rig.service, "secret")
    config, state = uvicorn.Config(app, log_config=None), ServerState()
    config.load()
    private = private_listener(os.getpid())

    def connect() -> asyncio.Protocol:
        return HttpToolsProtocol(config, state, {})

    async with await asyncio.get_running_loop().create_unix_server(connect, sock=private):
        yield


def play_two(scene: Scene, **fields: object) -> None:
    """Play a scene with two servers over real sockets, on the loop that a server uses."""

    async def beside(former: Rig) -> None:
        own = build_rig(Setting(texts=("New.",), step=0.0))
        async with asyncio.TaskGroup() as group:
            running = group.create_task(own.service.groups.run())
            async with served_privately(former):
                await scene(Two(former, own))
            await own.service.store.held.close()
            running.cancel()
        own.service.store.close()

    setting = Setting(**{"texts": (STORY,), "step": 0.001, **fields})  # type: ignore[arg-type]
    play(beside, setting, run=uvloop.run)


async def begin(client: Client, name: str) -> bytes:
    """A stream of that name, read to its end."""
    body = {"model": MODEL, "messages": USER, "stream": True}
    exchange = await client.post(CHAT, body, {"x-conversation-id": name})
    assert exchange.status == 200
    return exchange.content


@pytest.mark.parametrize("name", ["talk", "a/b", "a#b", "a+b=@c:d", "talk/cancel"])
@plays(play_two)
async def test_a_stream_of_the_former_server_is_read_and_deleted_through_the_new_one(
    two: Two, name: str
) -> None:
    whole = await begin(two.former.client, name)
    exchange = await two.client.get(f"/v1/stream/{name}")
    assert exchange.status == 200
    assert exchange.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert exchange.content == whole
    headers = {"x-conversation-id": name, "last-event-id": "1"}
    exchange = await two.client.post(CHAT, {"model": MODEL, "messages": USER}, headers)
    assert whole.endswith(exchange.content)
    assert (await two.client.send("DELETE", f"/v1/stream/{name}")).json["deleted"]
    assert not two.former.service.store.held.named("default")
    assert (await two.client.get(f"/v1/stream/{name}")).status == 404


async def listed(client: Client, query: str = "") -> dict[str, int]:
    """The bytes of the streams that are listed, by name."""
    exchange = await client.get(f"/v1/streams{query}")
    return {each["id"]: each["num_bytes"] for each in exchange.json["data"]}


@pytest.mark.parametrize(("host", "status"), [(None, 200), ("localhost", 200), ("podway", 403)])
@plays(play_two)
async def test_the_former_server_checks_the_host_that_the_client_names(
    two: Two, host: str | None, status: int
) -> None:
    await begin(two.former.client, "talk")
    headers = {} if host is None else {"host": host}
    assert (await two.client.get("/v1/stream/talk", headers)).status == status


@plays(play_two)
async def test_the_streams_of_both_servers_are_listed(two: Two) -> None:
    for client, names in ((two.former.client, ("old", "both")), (two.client, ("both", "new"))):
        for name in names:
            await begin(client, name)
    sizes = await listed(two.client)
    assert list(sizes) == ["old", "both", "new"]
    assert sizes["both"] == sizes["new"] < sizes["old"]
    assert list(await listed(two.client, "?conversation_id=old")) == ["old"]
    assert (await two.client.send("HEAD", "/v1/streams")).status == 200
    assert await listed(two.client, "?conversation_id=none") == {}


@plays(partial(play_two, keys=("a",), allowance=Allowance(requests_per_minute=1)))
async def test_streams_are_not_listed_without_those_of_a_former_server_that_refuses_to(
    two: Two,
) -> None:
    for headers, status in (({}, 200), (KEY, 200), (KEY, 503)):
        assert (await two.client.get("/v1/streams", headers)).status == status


@plays(partial(play_two, **LONG))
async def test_a_conversation_that_goes_on_in_the_new_server_ends_its_stream_in_the_former_one(
    two: Two,
) -> None:
    talk = {"x-conversation-id": "a/b"}
    async with two.former.client.post(CHAT, chat(stream=True), talk) as old:
        assert await old.start() == 200
        assert (await two.client.post(CHAT, chat(stream=True, n=0), talk)).status == 400
        assert list(await listed(two.former.client)) == ["a/b"]
        await begin(two.client, "a/b")
        *_, last = [event async for event in old.events()]
        assert last["error"]["code"] == "request_cancelled"
    assert await listed(two.former.client) == {}


async def until(is_true: Callable[[], bool]) -> None:
    while not is_true():  # noqa: ASYNC110 # the engine has no event for it
        await asyncio.sleep(0)


@asynccontextmanager
async def retried(two: Two, *, stream: bool) -> AsyncIterator[tuple[Exchange, Exchange]]:
    """A retry at the new server of a request that waits in the former one, and the request there
    that takes its place until it leaves."""
    former, body, pool = two.former.client, chat(stream=stream), two.former.engine.scheduler.pool
    async with former.post(CHAT, chat(stream=True)) as running:
        await until(lambda: len(pool) == 1)
        async with former.post(CHAT, body, RETRY) as earlier:
            await until(lambda: len(pool) == 2)
            async with two.client.post(CHAT, body, RETRY) as later:
                await check_superseded(earlier, stream=False)
                yield later, running


ONE_PLACE: dict[str, Any] = {"texts": ("Other. " * 20, STORY), "step": 0.05, "max_batch_size": 1}


@pytest.mark.parametrize("stream", [True, False])
@plays(partial(play_two, **ONE_PLACE))
async def test_a_retry_takes_over_what_is_in_flight_in_the_former_server(
    two: Two, stream: bool
) -> None:
    async with retried(two, stream=stream) as (later, running):
        running.disconnect()
        if stream:
            answer = "".join([content_of(event) async for event in later.events()])
        else:
            answer = (await later.json())["choices"][0]["message"]["content"]
        assert later.status == 200
        assert answer == STORY
    assert [request.abort for request in two.former.ended] == [Abort.CLIENT_GONE, None]
    assert not two.own.ended


@plays(partial(play_two, **ONE_PLACE))
async def test_the_last_client_that_leaves_ends_what_it_took_over_in_the_former_server(
    two: Two,
) -> None:
    async with retried(two, stream=False) as (later, _):
        later.disconnect()
        await later.ended()
        await until(lambda: len(two.former.engine.scheduler.pool) == 1)


@plays(play_two)
async def test_a_request_whose_idempotency_key_is_not_in_flight_runs_in_the_new_server(
    two: Two,
) -> None:
    await two.former.client.post(CHAT, chat(), RETRY)
    exchange = await two.client.post(CHAT, chat(), RETRY)
    assert exchange.json["choices"][0]["message"]["content"] == "New."


def test_a_former_server_that_hangs_keeps_no_new_request_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwarding, "ASKING_SECONDS", 0.01)

    async def scene(own: Rig) -> None:
        with private_listener(os.getpid()):
            async with Two(own, own).client.post(CHAT, chat(), RETRY) as exchange:
                assert await exchange.start() == 200

    play(scene, Setting(step=0.0), run=uvloop.run)


@plays(play_two)
async def test_what_the_new_server_has_is_answered_there(two: Two) -> None:
    await begin(two.former.client, "talk")
    whole = await begin(two.client, "talk")
    assert (await two.client.get("/v1/stream/talk")).content == whole
    assert (await two.client.get("/v1/models")).status == 200


@plays(partial(play_two, **LONG))
async def test_a_request_of_the_former_server_is_cancelled_and_explained_through_the_new_one(
    two: Two,
) -> None:
    body = {"model": MODEL, "messages": USER, "stream": True}
    async with two.former.client.post(CHAT, body, {"x-request-id": "one"}) as exchange:
        assert await exchange.start() == 200
        assert (await two.client.get("/v1/requests/one/timeline")).status == 200
        assert (await two.client.post("/v1/requests/one/cancel", {})).status == 200
        await exchange.read()
    await until(lambda: bool(two.former.ended))  # after its last iteration
    assert [request.state for request in two.former.ended] == [State.CANCELLED]
    assert (await two.client.post("/v1/requests/none/cancel", {})).status == 404


@plays(partial(play_two, max_body_bytes=1 << 20))
async def test_a_body_beyond_the_limit_is_not_collected_for_the_former_server(two: Two) -> None:
    pieces = [b" " * (1 << 19)] * 6
    exchange = two.client.send("POST", "/v1/requests/one/cancel", pieces)
    exchange.hold_back(2)
    async with exchange:
        assert await exchange.start() == 404  # though two pieces never come


def test_a_request_waits_for_the_journal_once_the_former_server_has_ended(tmp_path: Path) -> None:
    async def former(rig: Rig) -> None:
        await begin(rig.client, "talk")

    async def scene(own: Rig) -> None:
        two = Two(own, own)  # nobody listens on the private socket
        async with two.client.get("/v1/stream/talk") as exchange:
            starting = asyncio.create_task(exchange.start())
            await restore_streams(own.service, ROUTES.planners)
            two.restored.set()
            assert await starting == 200
            assert (await exchange.read()).endswith(b"data: [DONE]\n\n")

    play(former, Setting(texts=(STORY,), step=0.0, store=tmp_path / "store"), run=asyncio.run)
    play(scene, Setting(store=tmp_path / "store"), run=asyncio.run)


@plays(play_two)
async def test_only_the_successor_may_use_the_private_socket(two: Two) -> None:
    connector = PrivateConnector(private_socket(os.getpid()))
    async with aiohttp.ClientSession(connector=connector) as session:
        for secret, status in (("", 403), ("another", 403), ("secret", 200)):
            headers = {
                SECRET.decode(): secret,
                CLIENT.decode(): "127.0.0.1",
                "host": "localhost",
            }
            async with session.get("http://podway/v1/models", headers=headers) as response:
                assert response.status == status
