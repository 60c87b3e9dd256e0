import asyncio

import pytest

from engine.control.admission import Admission
from engine.errors import (
    ContextTooLong,
    DeadlineExceeded,
    DeadlineUnmeetable,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    StepFailed,
    Unavailable,
    WorkerLost,
)
from gateway.errors import error_headers, http_error
from gateway.schema.dialect import OPENAI
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, play, played, text

STREAMED_OR_NOT = pytest.mark.parametrize("stream", [True, False])


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("no", "n"), 400, "invalid_request_error"),
        (ContextTooLong(5, 6, 10, "context"), 400, "context_length_exceeded"),
        (Overloaded("full", 1.2), 503, "overloaded"),
        (DeadlineUnmeetable("late", 1.2), 503, "deadline_unmeetable"),
        (DeadlineExceeded("late"), 504, "deadline_exceeded"),
        (ShuttingDown(), 503, "unavailable"),
        (StepFailed("secret"), 500, "internal_error"),
        (WorkerLost("secret"), 500, "internal_error"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_every_error_class_has_a_row(error: Exception, status: int, code: str) -> None:
    assert http_error(error).status == status
    assert http_error(error).code == code
    assert b"secret" not in OPENAI.error_body(error, "")


def test_a_full_server_sends_retry_after() -> None:
    assert error_headers(Overloaded("full", 1.2)) == {
        "retry-after": "2",
        "retry-after-ms": "1200",
        "x-should-retry": "true",
    }


def test_a_server_with_a_restarting_worker_sends_retry_after() -> None:
    assert error_headers(Unavailable("restarting", 1.2))["retry-after-ms"] == "1200"
    assert error_headers(Unavailable("for good")) == {"x-should-retry": "true"}


@STREAMED_OR_NOT
@played(Setting(num_blocks=28, admission=Admission.RESERVE, max_queue_requests=1))
async def test_a_full_queue_is_a_503_before_any_stream(rig: Rig, stream: bool) -> None:
    async with rig.client.post(CHAT, chat(max_tokens=20)) as first:
        await asyncio.sleep(STEP / 2)
        async with rig.client.post(CHAT, chat(max_tokens=20)) as second:
            await asyncio.sleep(STEP / 2)
            third = await rig.client.post(CHAT, chat(stream=stream, max_tokens=20))
            body = third.json
            await first.json()
            await second.json()
    assert third.status == 503
    assert body["error"]["code"] == "overloaded"
    assert int(third.headers["retry-after-ms"]) > 0
    assert third.headers["retry-after"] == "1"


def test_a_queue_that_one_key_has_filled_takes_a_request_of_another() -> None:
    async def status(rig: Rig, key: str) -> int:
        exchange = await rig.client.post(CHAT, chat(max_tokens=20), {"x-api-key": key})
        return exchange.status

    async def scene(rig: Rig) -> None:
        sent: list[asyncio.Task[int]] = []
        for key in ("k1", "k1", "k1", "k2", "k2"):
            sent.append(asyncio.create_task(status(rig, key)))
            await asyncio.sleep(STEP / 2)
        assert await asyncio.gather(*sent) == [200, 200, 503, 200, 503]

    admission = Admission.RESERVE
    keys = ("alice=k1", "bob=k2")
    play(scene, Setting(keys=keys, num_blocks=28, admission=admission, max_queue_requests=1))


@STREAMED_OR_NOT
@played(Setting(num_blocks=28, admission=Admission.RESERVE, max_queue_requests=3))
async def test_choices_that_do_not_all_fit_are_all_rejected(rig: Rig, stream: bool) -> None:
    async with rig.client.post(CHAT, chat(max_tokens=20)) as first:
        await asyncio.sleep(STEP / 2)
        async with rig.client.post(CHAT, chat(stream=stream, n=2)) as waits:
            await asyncio.sleep(STEP / 2)
            exchange = await rig.client.post(CHAT, chat(stream=stream, n=2))
            assert exchange.status == 503
            assert len(rig.ended) == 1
            await first.json()
            await waits.read()
    assert [request.outcome for request in rig.ended].count("cancelled") == 1


@STREAMED_OR_NOT
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": 4}, "n"), ({"prompt": ["a"] * 4}, "prompt"), ({"prompt": ["a" * 8] * 2}, "prompt")],
)
@played(Setting(max_queue_requests=3, max_queue_tokens=15))
async def test_choices_beyond_the_queues_limits_are_a_400_that_names_the_field(
    rig: Rig, stream: bool, fields: dict[str, object], param: str
) -> None:
    exchange = await rig.client.post(TEXT, text(stream=stream, **fields))
    error = exchange.json["error"]
    assert (exchange.status, error["param"]) == (400, param)
    assert "the queue holds" in error["message"]
    exchange = await rig.client.post(TEXT, text(prompt="a" * 40, stream=stream))
    assert exchange.status == 200, "one of any length may wait alone"
    assert len(rig.ended) == 1


@STREAMED_OR_NOT
@played()
async def test_a_draining_server_is_unavailable(rig: Rig, stream: bool) -> None:
    await rig.service.groups.drain(1)
    exchange = await rig.client.post(CHAT, chat(stream=stream))
    assert exchange.json["error"]["code"] == "unavailable"
    assert exchange.status == 503
    assert exchange.headers["retry-after"] == "5"
    assert (await rig.client.get("/ready")).status == 503
    assert (await rig.client.get("/health")).status == 200


@played()
async def test_a_server_is_unhealthy_from_its_first_rejection_for_good_on(rig: Rig) -> None:
    rig.engine.failure = "restarts are disabled"
    for path in ("/ready", "/health"):
        exchange = await rig.client.get(path)
        assert exchange.status == 503
        assert "retry-after" not in exchange.headers


@played()
async def test_a_stream_cut_off_at_shutdown_ends_with_one_error_event(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True, ignore_eos=True)) as exchange:
        await exchange.start()
        draining = asyncio.create_task(rig.service.groups.drain(3 * STEP))
        *chunks, last = [event async for event in exchange.events()]
        await draining
    assert exchange.status == 200
    assert chunks
    assert last["error"]["code"] == "unavailable"


@played()
async def test_an_early_failure_is_a_real_status_and_a_late_one_an_event(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True)) as early:
        await asyncio.sleep(STEP / 2)
        rig.engine._streams.wake(rig.engine.scheduler.fail_all(StepFailed("secret"), 0.1))
        body = await early.json()
        assert early.status == 500
        assert body["error"]["code"] == "internal_error"
    async with rig.client.post(CHAT, chat(stream=True)) as late:
        await asyncio.sleep(4.5 * STEP)
        rig.engine._streams.wake(rig.engine.scheduler.fail_all(StepFailed("secret"), 1.0))
        *_, last = [event async for event in late.events()]
        assert late.status == 200
        assert last["error"]["type"] == "server_error"


@played(Setting(num_blocks=28, admission=Admission.RESERVE))
async def test_the_status_line_is_delayed_by_at_most_one_second(rig: Rig) -> None:
    async with (
        rig.client.post(CHAT, chat(max_tokens=20)) as first,
        rig.client.post(CHAT, chat(stream=True, max_tokens=20)) as second,
    ):
        assert await second.start() == 200
        assert rig.service.clock() == 1.0
        await first.json()
        assert [event async for event in second.events()][-1] == "DONE"


@pytest.mark.parametrize(
    ("path", "body", "lengths"),
    [
        (CHAT, chat(messages=[{"role": "user", "content": "x" * 300}]), ("200", "306")),
        (TEXT, text(max_tokens=500), ("200", "500")),
    ],
)
def test_the_error_of_what_is_too_long_has_both_lengths(
    path: str, body: dict[str, object], lengths: tuple[str, str]
) -> None:
    answer = answer_to(path, body)
    error = answer.json["error"]
    assert answer.status == 400
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if path == CHAT else "prompt")
    assert all(length in error["message"] for length in lengths)


@played()
async def test_every_response_has_a_request_id(rig: Rig) -> None:
    exchanges = [
        rig.client.get("/health"),
        rig.client.get("/nowhere"),
        rig.client.post(CHAT, chat()),
        rig.client.post(CHAT, chat(stream=True)),
        rig.client.post(CHAT, b"{"),
    ]
    for exchange in exchanges:
        async with exchange:
            await exchange.read()
        assert exchange.headers["x-request-id"].startswith("req_")
        assert exchange.headers["openai-processing-ms"].isdecimal()
        assert exchange.headers["openai-version"]


@played()
async def test_a_valid_request_id_is_kept_and_an_invalid_one_replaced(rig: Rig) -> None:
    for offered, kept in (("my-id.7", True), ("a b", False), ("x" * 200, False)):
        exchange = await rig.client.get("/health", {"x-request-id": offered})
        assert (exchange.headers["x-request-id"] == offered) is kept


@played()
async def test_the_time_until_the_first_event_is_the_processing_time(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True)) as exchange:
        await exchange.start()
    assert exchange.headers["openai-processing-ms"] == "250"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("GET", "/v1/models/org/other", 404, "model_not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ],
)
@played()
async def test_an_unknown_path_or_method_is_a_json_error(
    rig: Rig, method: str, path: str, status: int, code: str
) -> None:
    exchange = await rig.client.send(method, path)
    assert exchange.status == status
    assert exchange.json["error"]["code"] == code
    assert ("allow" in exchange.headers) is (status == 405)


@played(Setting(keys=("sk-a",)))
async def test_options_of_the_server_are_the_methods_of_all_routes(rig: Rig) -> None:
    exchange = await rig.client.send("OPTIONS", "*", headers={"x-api-key": "sk-a"})
    assert (exchange.status, exchange.content) == (204, b"")
    assert exchange.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, POST"
    assert "x-request-id" in exchange.headers


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/responses", "/v1/responses"),
        ("//v1/messages", "/v1/messages"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/mesages", "/v1/messages"),
    ],
)
def test_the_error_of_a_wrong_path_names_the_one_that_is_meant(path: str, meant: str) -> None:
    answer = answer_to(path, {})
    assert answer.status == 404
    assert answer.json["error"]["message"] == f"No endpoint at {path}. Did you mean {meant}?"


def test_the_error_of_any_other_path_names_none() -> None:
    for path in ("/v1/images/generations", "/v1/chat/completion" + "s" * 60):
        answer = answer_to(path, {})
        assert answer.json["error"]["message"] == f"No endpoint at {path}."


@pytest.mark.parametrize(("path", "ask"), [(CHAT, chat()), (TEXT, text())])
def test_base_urls_without_v1_are_served(path: str, ask: object) -> None:
    answer = answer_to(path.removeprefix("/v1"), ask)
    assert answer.status == 200
    assert answer.json["choices"][0]["finish_reason"] == "stop"


def test_an_unknown_model_is_a_404() -> None:
    answer = answer_to(CHAT, chat(model="gpt-x"))
    error = answer.json["error"]
    assert answer.status == 404
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=x"]
)
@played()
async def test_a_body_that_is_not_json_by_its_type_is_a_415(rig: Rig, media_type: str) -> None:
    exchange = await rig.client.post(CHAT, chat(), {"content-type": media_type})
    assert exchange.json["error"]["code"] == "unsupported_media_type"
    assert exchange.status == 415


@pytest.mark.parametrize("announced", [True, False])
@played(Setting(max_body_bytes=1000))
async def test_a_body_that_is_too_large_is_a_413(rig: Rig, announced: bool) -> None:
    pieces = [b" " * 60] * 30
    headers = {"content-type": "application/json"}
    if announced:
        headers["content-length"] = "1800"
    exchange = await rig.client.send("POST", CHAT, pieces, headers)
    assert exchange.json["error"]["code"] == "request_too_large"
    assert exchange.status == 413


@played()
async def test_a_body_that_does_not_arrive_is_a_408(rig: Rig) -> None:
    exchange = rig.client.send("POST", CHAT, [b"{", b""], {"content-type": "application/json"})
    exchange.hold_back(1)
    async with exchange:
        assert (await exchange.json())["error"]["code"] == "request_timeout"
    assert rig.service.clock() == 10.0
    assert exchange.status == 408
