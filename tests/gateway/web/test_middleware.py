import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from gateway.access.intake import ABANDONED_SECONDS, LONG_PIECE_FACTOR, PIECE_SECONDS, Intake
from gateway.store.database import store_meter
from gateway.web.middleware import EXPOSED, IdentifyCaller
from tests.gateway.rig import CHAT, STEP, Rig, Setting, chat, play, played
from tests.gateway.scripted_model import Inline

T = TypeVar("T")
PAGE = "https://page.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/admin/policy"),
        ("GET", "/nowhere"),
        ("POST", CHAT),
        ("OPTIONS", CHAT),
    ],
)
@played(Setting(keys=("k",)))
async def test_every_route_except_probes_needs_a_key(rig: Rig, method: str, path: str) -> None:
    exchange = await rig.client.send(method, path)
    assert exchange.status == 401
    assert exchange.json["error"]["code"] == "invalid_api_key"
    assert exchange.headers["www-authenticate"] == "Bearer"
    assert (await rig.client.send(method, path, headers={"x-api-key": "k"})).status != 401
    for probe in ("/health", "/ready"):
        assert (await rig.client.get(probe)).status == 200


@pytest.mark.parametrize("origins", [(PAGE,), ("*",)])
def test_an_allowed_origin_may_preflight_and_read_responses(
    origins: tuple[str, ...],
) -> None:
    async def scene(rig: Rig) -> None:
        exchange = await rig.client.send("OPTIONS", CHAT, headers=PREFLIGHT)
        assert exchange.status == 200
        allowed = exchange.headers["access-control-allow-origin"]
        assert allowed in (PAGE, "*")
        assert "authorization" in exchange.headers["access-control-allow-headers"]
        headers = {"origin": PAGE, "x-api-key": "k"}
        for stream in (True, False):
            exchange = await rig.client.post(CHAT, chat(stream=stream), headers)
            assert exchange.headers["access-control-allow-origin"] == allowed
            assert exchange.headers["access-control-expose-headers"] == ", ".join(EXPOSED)

    play(scene, Setting(keys=("k",), cors_origins=origins))


@played(Setting(keys=("k",), cors_origins=(PAGE,)))
async def test_an_allowed_origin_may_read_error_responses(rig: Rig) -> None:
    exchange = await rig.client.post(CHAT, chat(), {"origin": PAGE})
    assert exchange.status == 401
    assert exchange.headers["access-control-allow-origin"] == PAGE


@played(Setting(cors_origins=(PAGE,)))
async def test_other_origins_get_no_cors_headers(rig: Rig) -> None:
    other = {"origin": "https://other.example"}
    exchange = await rig.client.send("OPTIONS", CHAT, headers=PREFLIGHT | other)
    assert exchange.status == 400
    assert "access-control-allow-origin" not in exchange.headers
    exchange = await rig.client.post(CHAT, chat(), other)
    assert "access-control-allow-origin" not in exchange.headers


@played()
async def test_without_cors_there_are_no_cors_headers(rig: Rig) -> None:
    exchange = await rig.client.post(CHAT, chat(), {"origin": PAGE})
    assert not any(name.startswith("access-control") for name in exchange.headers)


def intake_of(rig: Rig) -> Intake:
    """The intake of the app."""
    assert isinstance(rig.app, IdentifyCaller)
    return rig.app._intake


@played()
async def test_probes_and_cancellations_do_not_wait_while_the_intake_is_in_debt(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True, max_tokens=5)) as stream:
        await stream.start()
        owing = intake_of(rig)
        before = rig.service.clock()
        for method, path in (
            ("GET", "/health"),
            ("GET", "/ready"),
            ("GET", "/metrics"),
            ("POST", "/v1/requests/none/cancel"),
        ):
            owing.charge(60.0, "127.0.0.1")
            assert (await rig.client.send(method, path)).status in (200, 404)
        assert rig.service.clock() == before
        await stream.read()


@played()
async def test_a_probe_waits_only_for_probes_of_its_own_client(rig: Rig) -> None:
    assert isinstance(rig.app, IdentifyCaller)
    async with rig.client.post(CHAT, chat(stream=True, max_tokens=50)) as stream:
        await stream.start()
        before = rig.service.clock()
        rig.app._urgent_intake.charge(60.0, "10.0.0.1")
        assert (await rig.client.get("/health")).status == 200
        assert rig.service.clock() == before
        rig.app._urgent_intake.charge(0.01, "127.0.0.1")
        assert (await rig.client.get("/health")).status == 200
        assert rig.service.clock() > before


@played()
async def test_requests_that_wait_get_a_503_when_the_server_drains(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True, max_tokens=5)) as stream:
        await stream.start()
        for client in ("127.0.0.1", "-", "testclient"):
            intake_of(rig).charge(60.0, client)
        async with rig.client.post(CHAT, chat()) as waiting:
            draining = asyncio.create_task(rig.service.groups.drain(100))
            before = rig.service.clock()
            assert await waiting.start() == 503
            assert rig.service.clock() - before < STEP
            await stream.read()
        await draining


@pytest.mark.parametrize("stream", [True, False])
@played()
async def test_the_work_for_a_client_that_leaves_is_its_debt(rig: Rig, stream: bool) -> None:
    """Virtual time stands still while the loop works, so there are no other debts."""
    await rig.client.post(CHAT, chat(stream=stream))
    intake = intake_of(rig)
    assert len(intake._debts) == 0
    async with rig.client.post(CHAT, chat(stream=stream, max_tokens=9)) as exchange:
        await asyncio.sleep(1.5 * STEP)
        exchange.disconnect()
        await exchange.ended()
    assert intake._debts.of("127.0.0.1") == pytest.approx(ABANDONED_SECONDS)


class ChargesTenMs(Inline):
    """A store each of whose pieces of work takes 10 ms of the interpreter's time."""

    async def __call__(self, work: Callable[[], T]) -> T:
        if (charge := store_meter.get()) is not None:
            charge(0.01)
        return await super().__call__(work)


@played(Setting(store_executor=ChargesTenMs))
async def test_what_the_store_does_for_a_client_is_its_debt(rig: Rig) -> None:
    assert (await rig.client.get("/v1/conversations/conv_x")).status == 404
    owed = PIECE_SECONDS + LONG_PIECE_FACTOR * (0.01 - PIECE_SECONDS)
    assert intake_of(rig)._debts.of("127.0.0.1") == pytest.approx(owed)
