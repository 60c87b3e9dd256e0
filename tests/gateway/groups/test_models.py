import asyncio
from typing import Any, cast

import pytest

from gateway.groups.group import RETRY_SECONDS, Status
from gateway.groups.terms import ServerTerms, Terms
from tests.gateway.forms import a_line, ended, lines_of, started
from tests.gateway.groups.rig import Fleet, Model, play, played
from tests.gateway.rig import CHAT, MODEL, STEP, TEXT, Rig, chat
from tests.gateway.rig import play as play_one
from tests.gateway.scenes import plays
from tests.wire.asgi import Exchange

TWO_FIT = ServerTerms(memory=2)
LONG = "The quick brown fox jumps over the lazy dog."


async def ask(fleet: Fleet, model: str) -> tuple[int, Any]:
    exchange = await fleet.client.post(CHAT, chat(model=model))
    return exchange.status, exchange.json


async def stream(fleet: Fleet, model: str, num_tokens: int) -> str:
    """The text of a stream that takes `num_tokens` iterations."""
    fields = {"model": model, "prompt": "ab", "stream": True, "ignore_eos": True}
    text = ""
    async with fleet.client.post(TEXT, fields | {"max_tokens": num_tokens}) as exchange:
        async for event in exchange.events():
            assert event == "[DONE]" or event == "DONE" or "error" not in event, event
            if not isinstance(event, str):
                text += event["choices"][0]["text"]
    return text


def test_a_request_waits_until_its_model_is_loaded() -> None:
    async def scene(fleet: Fleet) -> None:
        now = asyncio.get_running_loop().time
        status, body = await ask(fleet, "b")
        assert (status, body["model"]) == (200, "b")
        assert now() >= 2.0
        began = now()
        await ask(fleet, "b")
        assert now() - began < 2.0  # it was loaded already

    assert play(scene, Model("a"), Model("b")).loads == ["b"]


def test_requests_of_one_model_share_its_load() -> None:
    async def scene(fleet: Fleet) -> None:
        answers = await asyncio.gather(*(ask(fleet, "a") for _ in range(5)))
        assert {status for status, _ in answers} == {200}

    assert play(scene, Model("a"), Model("b")).loads == ["a"]


def test_no_running_request_is_cut_for_a_load() -> None:
    async def scene(fleet: Fleet) -> None:
        running = asyncio.create_task(stream(fleet, "a", 100))
        await asyncio.sleep(2.0 + 10 * STEP)
        status, _ = await ask(fleet, "b")
        assert status == 200
        assert running.done(), "b was loaded in the memory of a, which was in use"
        alone = asyncio.create_task(stream(fleet, "a", 100))
        assert await running == await alone

    fleet = play(scene, Model("a"), Model("b"), terms=ServerTerms(memory=1))
    assert fleet.loads == ["a", "b", "a"]


@played(Model("a"), Model("b"), Model("c"), terms=TWO_FIT)
async def test_the_least_recently_used_model_goes_first(fleet: Fleet) -> None:
    for name in ("a", "b", "a", "c"):
        await ask(fleet, name)
    assert [group.status for group in fleet.groups] == [
        Status.LOADED,
        Status.UNLOADED,
        Status.LOADED,
    ]


def test_pinned_models_stay_and_low_priorities_go_first() -> None:
    async def scene(fleet: Fleet) -> None:
        for name in ("pinned", "high", "low", "high", "low", "new"):
            await ask(fleet, name)
        loaded = {group.name for group in fleet.groups if group.accepts}
        assert loaded == {"pinned", "high", "new"}

    models = (
        Model("pinned", Terms(pinned=True)),
        Model("high", Terms(priority=1)),
        Model("low"),
        Model("new", Terms(priority=2)),
    )
    play(scene, *models, terms=ServerTerms(memory=3))


def test_the_memory_bound_holds_at_every_moment() -> None:
    async def scene(fleet: Fleet) -> None:
        asking = asyncio.gather(*(ask(fleet, name) for name in "abcdcba" * 3))
        while not asking.done():
            assert fleet.groups.loads.num_bytes <= 3
            await asyncio.sleep(STEP / 2)
        assert {status for status, _ in await asking} == {200}

    models = [Model(name, num_bytes=size) for name, size in zip("abcd", (1, 2, 1, 3), strict=True)]
    play(scene, *models, terms=ServerTerms(memory=3, max_load_wait=1000.0))


@played(Model("a"), Model("slow", load_seconds=100.0), terms=ServerTerms(max_load_wait=60))
async def test_a_load_that_would_take_too_long_is_a_503_with_the_forecast(fleet: Fleet) -> None:
    exchange = await fleet.client.post(CHAT, chat(model="slow"))
    assert (exchange.status, exchange.json["error"]["code"]) == (503, "unavailable")
    assert exchange.headers["retry-after"] == "100"
    await asyncio.sleep(float(exchange.headers["retry-after"]))
    assert (await ask(fleet, "slow"))[0] == 200


def test_a_failed_load_is_only_that_models() -> None:
    async def scene(fleet: Fleet) -> None:
        (bad, error), (good, _) = await asyncio.gather(ask(fleet, "bad"), ask(fleet, "good"))
        assert (bad, good) == (503, 200)
        assert "the disk is on fire" in error["error"]["message"]
        status = (await fleet.client.get("/v1/models/bad")).json["status"]
        assert status == {"value": "failed", "error": "the disk is on fire"}
        assert (await ask(fleet, "bad"))[0] == 503  # without another try
        await asyncio.sleep(RETRY_SECONDS)
        assert (await ask(fleet, "bad"))[0] == 200

    assert play(scene, Model("bad", num_failures=1), Model("good")).loads == ["good", "bad"]


@played(Model("a", Terms(pinned=True)), Model("large", num_bytes=3), terms=TWO_FIT)
async def test_a_model_that_can_never_fit_names_the_missing_bytes(fleet: Fleet) -> None:
    status, body = await ask(fleet, "large")
    assert status == 503
    assert "missing" in body["error"]["message"], body
    assert (await ask(fleet, "a"))[0] == 200


def test_an_unknown_model_is_a_404_with_all_names() -> None:
    async def scene(fleet: Fleet) -> None:
        status, body = await ask(fleet, "c")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        assert "'a' and 'b'" in body["error"]["message"]

    assert play(scene, Model("a"), Model("b")).loads == []


@played(Model("a"), Model("b"))
async def test_a_client_that_leaves_while_its_model_loads_leaves_nothing(fleet: Fleet) -> None:
    async with fleet.client.post(CHAT, chat(model="a")) as exchange:
        await asyncio.sleep(1.0)
        exchange.disconnect()
        await exchange.ended()
    assert fleet.group("a").status is Status.LOADING
    await asyncio.sleep(2.0)
    assert fleet.group("a").accepts
    assert not fleet.group("a").is_used


def test_an_idle_model_is_unloaded_and_loaded_again() -> None:
    async def scene(fleet: Fleet) -> None:
        await stream(fleet, "a", 100)  # takes longer than the model may be idle
        await asyncio.sleep(9.0)
        assert fleet.group("a").accepts
        await asyncio.sleep(2.0)
        assert fleet.group("a").status is Status.UNLOADED
        assert (await ask(fleet, "a"))[0] == 200

    assert play(scene, Model("a", Terms(idle_unload=10.0))).loads == ["a", "a"]


@played(Model("a"), Model("b"))
async def test_a_shutdown_answers_requests_that_wait_for_a_load(fleet: Fleet) -> None:
    async with fleet.client.post(CHAT, chat(model="a")) as exchange:
        await asyncio.sleep(0.5)
        await fleet.groups.drain(1.0)
        assert await exchange.start() == 503
        assert "shutting down" in (await exchange.json())["error"]["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_tokens_are_those_of_the_named_model(path: str) -> None:
    async def scene(fleet: Fleet) -> None:
        fields = (
            {"model": "b", "prompt": "ab"}
            if path == "/tokenize"
            else {"model": "b", "tokens": [97]}
        )
        exchange = await fleet.client.post(path, fields)
        assert exchange.status == 200

    assert play(scene, Model("a"), Model("b")).loads == ["b"]


@played(Model("a"), Model("b", Terms(autoload=False)))
async def test_models_are_loaded_and_unloaded_by_their_name(fleet: Fleet) -> None:
    async def act(path: str) -> int:
        exchange = await fleet.client.post(path, {"model": "b"})
        assert exchange.json == {"success": True}
        return exchange.status

    await act("/models/load")
    assert fleet.group("b").status is Status.LOADING
    await asyncio.sleep(2.0 + STEP)
    assert fleet.group("b").accepts
    running = asyncio.create_task(stream(fleet, "b", 20))
    await asyncio.sleep(2 * STEP)
    await act("/models/unload")
    await asyncio.sleep(2 * STEP)
    assert fleet.group("b").status is Status.UNLOADING
    await running
    await asyncio.sleep(STEP)
    assert fleet.group("b").status is Status.UNLOADED


@played(Model("a"), Model("b"), terms=ServerTerms(memory=1))
async def test_changes_of_statuses_are_sent_as_they_happen(fleet: Fleet) -> None:
    seen: list[tuple[str, str, str]] = []

    async def read(exchange: Exchange) -> None:
        async for event in exchange.events():
            seen.append((event["event"], event["model"], event["data"]["status"]))

    async with fleet.client.get("/models/sse") as exchange:
        reading = asyncio.create_task(read(exchange))
        await asyncio.sleep(STEP)
        await ask(fleet, "a")
        await ask(fleet, "b")
        await fleet.groups.drain(1.0)
        await reading
    assert seen == [
        ("model_status", "a", "unloaded"),
        ("model_status", "b", "unloaded"),
        ("status_change", "a", "loading"),
        ("status_change", "a", "loaded"),
        ("status_change", "a", "unloading"),
        ("status_change", "a", "unloaded"),
        ("status_change", "b", "loading"),
        ("status_change", "b", "loaded"),
    ]


def test_a_forecast_counts_the_loads_that_come_first() -> None:
    async def scene(fleet: Fleet) -> None:
        others = [asyncio.create_task(ask(fleet, name)) for name in "ab"]
        await asyncio.sleep(1.0)
        exchange = await fleet.client.post(CHAT, chat(model="c"))
        assert exchange.status == 503
        assert exchange.headers["retry-after"] == str(20 + 20 + 20 - 1)
        await asyncio.sleep(59.0)
        assert fleet.group("c").accepts
        assert [(await each)[0] for each in others] == [200, 200]

    models = [Model(name, load_seconds=20.0) for name in "abc"]
    play(scene, *models, terms=ServerTerms(memory=3, max_load_wait=45.0))


@played(Model("a"), Model("b"), terms=ServerTerms(memory=1))
async def test_lines_of_a_batch_load_their_models(fleet: Fleet) -> None:
    lines = [a_line(f"{i}", chat(model="ab"[i % 2])) for i in range(6)]
    rig = cast("Rig", fleet)  # of which only the client is used
    batch = await ended(rig, await started(rig, b"\n".join(lines)))
    assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    models = [
        line["response"]["body"]["model"] for line in await lines_of(rig, batch["output_file_id"])
    ]
    assert sorted(models) == ["a", "a", "a", "b", "b", "b"]


@played(Model("a"), Model("b"))
async def test_a_response_in_the_background_keeps_its_model_loaded(fleet: Fleet) -> None:
    body = {"model": "a", "input": "hi", "background": True}
    response = (await fleet.client.post("/v1/responses", body)).json
    await asyncio.sleep(2 * STEP)
    fleet.groups.begin_unload(fleet.group("a"))
    await asyncio.sleep(STEP)
    assert fleet.group("a").status is Status.UNLOADING
    await asyncio.sleep(20 * STEP)
    assert (await fleet.client.get(f"/v1/responses/{response['id']}")).json["status"] == "completed"
    assert fleet.group("a").status is Status.UNLOADED


@played(Model("a", Terms(autoload=False)), Model("b"))
async def test_a_model_without_autoload_waits_for_an_operator(fleet: Fleet) -> None:
    status, body = await ask(fleet, "a")
    assert status == 503
    assert "/models/load" in body["error"]["message"]


@plays(play_one)
async def test_the_only_model_is_not_unloaded_by_name(rig: Rig) -> None:
    exchange = await rig.client.post("/models/unload", {"model": MODEL})
    assert exchange.json["error"]["code"] == "unsupported_model"


@played(Model("a"), Model("b"))
async def test_metrics_have_the_models_name(fleet: Fleet) -> None:
    await ask(fleet, "a")
    await ask(fleet, "b")
    lines = (await fleet.client.get("/metrics")).content.decode().splitlines()
    for name in "ab":
        assert f'podway_output_tokens_total{{model_name="{name}"}} 7.0' in lines
    assert any(line.startswith("podway_http_requests_total{method=") for line in lines)
