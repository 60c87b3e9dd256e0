import asyncio
from typing import Any

import pytest

from engine.policy import POLICIES
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, play, played, text

STREAMED_OR_NOT = pytest.mark.parametrize("stream", [True, False])
EVERYTHING: dict[str, Any] = {
    "priority": 3,
    "service_tier": "flex",
    "cache_salt": "s",
    "ttft_deadline_ms": 5000,
    "deadline_ms": 60_000,
}


@pytest.mark.parametrize(
    ("fields", "priority", "tier"),
    [
        ({}, 0, "default"),
        ({"service_tier": None}, 0, "default"),
        ({"service_tier": "auto"}, 0, "default"),
        ({"service_tier": "default"}, 0, "default"),
        ({"service_tier": "flex"}, 10, "flex"),
        ({"service_tier": "priority"}, -10, "priority"),
        ({"priority": -3}, -3, "default"),
        ({"priority": 0, "service_tier": "priority"}, 0, "priority"),
    ],
)
@played()
async def test_service_tiers_are_priorities_and_are_echoed(
    rig: Rig, fields: dict[str, Any], priority: int, tier: str
) -> None:
    assert (await rig.client.post(CHAT, chat(**fields))).json["service_tier"] == tier
    *chunks, _ = (await rig.client.post(CHAT, chat(stream=True, **fields))).events
    assert {chunk["service_tier"] for chunk in chunks} == {tier}
    assert {request.spec.priority for request in rig.ended} == {priority}


@played(Setting(policy="priority", max_batch_size=1))
async def test_the_priority_policy_orders_requests_by_tier(rig: Rig) -> None:
    async def ask(tier: str) -> None:
        await rig.client.post(CHAT, chat(service_tier=tier))

    await asyncio.gather(*map(ask, ("flex", "default", "priority")))
    ended = rig.ended
    assert [request.spec.priority for request in ended] == [-10, 0, 10]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (TEXT, text())])
def test_every_policy_accepts_every_field(policy: str, path: str, body: dict[str, Any]) -> None:
    async def scene(rig: Rig) -> None:
        exchange = await rig.client.post(path, body | EVERYTHING)
        assert exchange.status == 200, exchange.json

    (request,) = play(scene, Setting(policy=policy)).ended
    ask = request.spec
    assert (ask.priority, ask.salt, ask.ttft_deadline, ask.deadline) == (3, "s", 5.0, 60.0)


@played(Setting(keys=("secret-1", "secret-2")))
async def test_the_tenant_name_does_not_reveal_the_api_key(rig: Rig) -> None:
    for key in ("secret-1", "secret-2", "secret-1"):
        bearer = {"authorization": f"Bearer {key}"}
        await rig.client.post(CHAT, chat(), bearer)
    ended = rig.ended
    first, second, third = (request.spec.tenant for request in ended)
    assert first == third != second
    assert len(first) == len(second) == 16
    assert "secret" not in first + second


@played()
async def test_without_keys_all_requests_have_one_tenant(rig: Rig) -> None:
    bearer = {"authorization": "Bearer anything"}
    await rig.client.post(CHAT, chat(), bearer)
    assert [request.spec.tenant for request in rig.ended] == [""]


@STREAMED_OR_NOT
@played()
async def test_a_deadline_before_the_first_token_is_a_504(rig: Rig, stream: bool) -> None:
    body = chat(stream=stream, deadline_ms=STEP * 500)
    exchange = await rig.client.post(CHAT, body)
    error = exchange.json["error"]
    assert exchange.status == 504
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    assert error["message"] == "The request's deadline of 0.125 s passed after 0 output tokens."
    await asyncio.sleep(STEP)
    assert rig.metrics.requests.outcomes["expired"] == 1


@played()
async def test_a_deadline_during_generation_ends_a_whole_response_with_a_504(rig: Rig) -> None:
    exchange = await rig.client.post(CHAT, chat(n=3, deadline_ms=STEP * 2500))
    assert exchange.json["error"]["code"] == "deadline_exceeded"
    assert exchange.status == 504
    await asyncio.sleep(STEP)
    assert rig.metrics.requests.outcomes["expired"] == 3


@played()
async def test_a_deadline_during_a_stream_is_its_last_event(rig: Rig) -> None:
    exchange = await rig.client.post(CHAT, chat(stream=True, deadline_ms=STEP * 2500))
    *chunks, last = exchange.events
    assert exchange.status == 200
    said = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(said) == "He"
    assert last["error"]["code"] == "deadline_exceeded"
    await asyncio.sleep(STEP)  # its last iteration returns
    lines = (await rig.client.get("/metrics")).content.decode().splitlines()
    assert 'podway_requests_total{outcome="expired"} 1.0' in lines
    assert 'podway_aborts_total{reason="deadline"} 1.0' in lines


@STREAMED_OR_NOT
@played(Setting(policy="deadline", max_batch_size=1))
async def test_a_deadline_that_the_queue_makes_unmeetable_is_rejected_with_retry_after(
    rig: Rig,
    stream: bool,
) -> None:
    """40 tokens before it and 40 of its own take about 20 s; alone it would be in time."""
    long = {"max_tokens": 40, "min_tokens": 40, "ignore_eos": True}
    async with rig.client.post(CHAT, chat(**long, deadline_ms=10_500)) as first:
        await asyncio.sleep(2.0)
        late = chat(**long, stream=stream, deadline_ms=12_000)
        second = await rig.client.post(CHAT, late)
        error = second.json["error"]
        assert second.status == 503
        assert (error["code"], error["param"]) == ("deadline_unmeetable", None)
        assert 1000 < int(second.headers["retry-after-ms"]) < 9000
        await first.json()
        assert first.status == 200


@pytest.mark.parametrize("param", ["ttft_deadline_ms", "deadline_ms"])
def test_a_deadline_that_an_idle_server_cannot_meet_is_a_400_that_names_the_field(
    param: str,
) -> None:
    answer = answer_to(CHAT, chat(**{param: 1}), Setting(policy="deadline"))
    error = answer.json["error"]
    assert answer.status == 400
    assert error["param"] == param
    assert error["message"].startswith(f"'{param}' cannot be met")
