import asyncio
from pathlib import Path

import pytest

from gateway.access.callers import Quotas, duration
from gateway.access.key_file import Allowance, Key
from gateway.errors import TooManyRequests
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, play, played, text

BEARER = {"authorization": "Bearer k"}


def key(**limits: int) -> Key:
    return Key("k", (), Allowance(**limits))


def test_the_request_bucket_refills_steadily_up_to_the_limit() -> None:
    quotas, three = Quotas(), key(requests_per_minute=3)
    for left in (2, 1, 0):
        assert quotas.enter(three, 0.0)["x-ratelimit-remaining-requests"] == str(left)
    with pytest.raises(TooManyRequests) as refused:
        quotas.enter(three, 5.0)
    assert refused.value.retry_after == pytest.approx(15.0)
    assert refused.value.headers["x-ratelimit-reset-requests"] == "55s"
    quotas.enter(three, 20.0)
    for _ in range(3):
        quotas.enter(three, 10_000.0)
    with pytest.raises(TooManyRequests):
        quotas.enter(three, 10_000.0)


def test_a_rejected_request_is_not_charged() -> None:
    quotas, one = Quotas(), key(requests_per_minute=1)
    quotas.enter(one, 0.0)
    for now in (10.0, 20.0, 59.0):
        with pytest.raises(TooManyRequests):
            quotas.enter(one, now)
    quotas.enter(one, 60.0)


def test_concurrent_requests_are_counted_until_they_leave() -> None:
    quotas, two = Quotas(), key(max_concurrent=2)
    assert quotas.enter(two, 0.0) == {}
    quotas.enter(two, 0.0)
    with pytest.raises(TooManyRequests, match="2 requests of this key are running"):
        quotas.enter(two, 0.0)
    quotas.leave(two)
    quotas.enter(two, 0.0)


def test_a_limit_that_changes_counts_from_the_next_request_on() -> None:
    quotas = Quotas()
    quotas.enter(key(requests_per_minute=1), 0.0)
    with pytest.raises(TooManyRequests):
        quotas.enter(key(requests_per_minute=1), 0.0)
    quotas.enter(key(), 0.0)
    quotas.enter(key(requests_per_minute=60), 1.0)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0ms"), (0.0171, "18ms"), (1, "1s"), (1.5, "1.5s"), (360, "6m0s"), (90.25, "1m30.25s")],
)
def test_durations_are_written_as_openai_does(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


@played(Setting(keys=("k",), allowance=Allowance(requests_per_minute=2)))
async def test_the_third_request_of_a_minute_is_a_429_that_says_when_to_come_back(rig: Rig) -> None:
    for left in (1, 0):
        exchange = await rig.client.post(CHAT, chat(stream=True), BEARER)
        assert exchange.status == 200
        assert exchange.headers["x-ratelimit-limit-requests"] == "2"
        assert exchange.headers["x-ratelimit-remaining-requests"] == str(left)
    exchange = await rig.client.post(CHAT, chat(stream=True), BEARER)
    error = exchange.json["error"]
    assert exchange.status == 429
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert exchange.headers["x-should-retry"] == "true"
    assert exchange.headers["retry-after"] == "27"
    milliseconds = int(exchange.headers["retry-after-ms"])
    assert 26_000 < milliseconds <= 27_000
    assert (await rig.client.get("/v1/models", BEARER)).status == 200
    await asyncio.sleep(milliseconds / 1000)
    assert (await rig.client.post(CHAT, chat(), BEARER)).status == 200


@played(Setting(keys=("k",), allowance=Allowance(tokens_per_minute=6)))
async def test_tokens_are_charged_when_known_and_a_negative_bucket_rejects_requests(
    rig: Rig,
) -> None:
    """A prompt of 2 and an answer of 7 tokens; 6 a minute is one in ten seconds."""
    exchange = await rig.client.post(TEXT, text(), BEARER)
    assert exchange.headers["x-ratelimit-remaining-tokens"] == "6"
    exchange = await rig.client.post(TEXT, text(), BEARER)
    assert exchange.status == 429
    assert exchange.json["error"]["type"] == "tokens"
    assert exchange.headers["x-ratelimit-remaining-tokens"] == "0"
    await asyncio.sleep(int(exchange.headers["retry-after-ms"]) / 1000)
    assert (await rig.client.post(TEXT, text(), BEARER)).status == 200


@pytest.mark.parametrize("stream", [True, False])
@played(Setting(keys=("k",), allowance=Allowance(max_concurrent=1)))
async def test_a_client_that_disconnects_frees_its_concurrent_request(
    rig: Rig, stream: bool
) -> None:
    async with rig.client.post(CHAT, chat(stream=stream), BEARER):
        await asyncio.sleep(2 * STEP)
        second = await rig.client.post(CHAT, chat(), BEARER)
        assert second.json["error"]["code"] == "rate_limit_exceeded"
        assert second.headers["retry-after"] == "1"
        cancel = await rig.client.post("/v1/requests/none/cancel", {}, BEARER)
        assert cancel.status == 404, "what saves work is not refused"
    assert (await rig.client.post(CHAT, chat(), BEARER)).status == 200


@played(Setting(keys=("k",), allowance=Allowance(max_concurrent=1)))
async def test_an_invalid_request_frees_its_concurrent_request(rig: Rig) -> None:
    for _ in range(3):
        assert (await rig.client.post(CHAT, b"{", BEARER)).status == 400


@played(Setting(allowance=Allowance(requests_per_minute=1)))
async def test_on_an_open_server_all_requests_share_the_limits(rig: Rig) -> None:
    await rig.client.post(CHAT, chat())
    assert (await rig.client.post(CHAT, chat())).status == 429


def test_keys_have_their_own_limits_weights_and_bounds(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        '[a]\nkey = "ka"\nrequests_per_minute = 1\nweight = 3\n[b]\nkey = "kb"\npriority = 2'
    )

    async def scene(rig: Rig) -> None:
        for shown, expected in (("ka", 200), ("ka", 429), ("kb", 200), ("kb", 200)):
            exchange = await rig.client.post(CHAT, chat(), {"x-api-key": shown})
            assert exchange.status == expected
        for fields in ({"priority": 1}, {"service_tier": "priority"}):
            exchange = await rig.client.post(CHAT, chat(**fields), {"x-api-key": "kb"})
            assert exchange.json["error"]["param"] == "priority"

    ended = play(scene, Setting(key_file=path)).ended
    asks = [(r.spec.tenant, r.spec.weight, r.spec.priority) for r in ended]
    assert asks == [("a", 3.0, 0), ("b", 1.0, 2), ("b", 1.0, 2)]


def test_without_limits_there_are_no_rate_limit_headers() -> None:
    quotas = Quotas()
    assert quotas.enter(key(), 0.0) == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [104]}),
        ("/v1/chat/completions/render", chat()),
    ],
)
@played(Setting(allowance=Allowance(requests_per_minute=2)))
async def test_tokenizing_counts_against_the_limit_on_requests(
    rig: Rig, path: str, body: object
) -> None:
    statuses = []
    for _ in range(3):
        statuses.append((await rig.client.post(path, body)).status)
    assert statuses == [200, 200, 429]
