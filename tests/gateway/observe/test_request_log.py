import asyncio
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.json_log import JsonFormatter
from gateway.access.key_file import Allowance
from gateway.observe.request_log import RequestLog, RequestRecord, as_text
from tests.gateway.forms import chat_lines, ended, started
from tests.gateway.rig import CHAT, STEP, TEXT, Rig, Setting, chat, play, played, text

LOGGER = "gateway.observe.request_log"
LONG = "a long story " * 5


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The fields of the lines that were logged at INFO or above."""
    caplog.set_level(logging.INFO)
    found: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (fields := getattr(record, "fields", None)) is not None:
                found.append(fields)

    logging.getLogger(LOGGER).addHandler(handler := Collect())
    yield found
    logging.getLogger(LOGGER).removeHandler(handler)


def picked(fields: dict[str, Any], *names: str) -> list[Any]:
    return [fields[name] for name in names]


@played(Setting(keys=("alice=k",)))
async def test_a_request_that_ended_is_one_line(
    rig: Rig, lines: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"x-request-id": "mine", "x-api-key": "k"}
    await rig.client.post(CHAT, chat(), headers)
    assert len(lines) == 1
    (message,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert message == (
        f"id=mine key=alice client=127.0.0.1 method=POST path={CHAT} status=200 reason=stop "
        "prompt_tokens=8 cached_tokens=0 output_tokens=7 ttft=0.250 jct=1.750"
    )


@pytest.mark.parametrize("stream", [True, False])
@played(Setting(texts=(LONG,)))
async def test_a_client_that_disconnects_is_logged_with_its_tokens(
    rig: Rig, lines: list[dict[str, Any]], stream: bool
) -> None:
    async with rig.client.post(CHAT, chat(stream=stream)) as exchange:
        await asyncio.sleep(4.5 * STEP)
        exchange.disconnect()
        await exchange.ended()
    await asyncio.sleep(STEP)
    (line,) = lines
    assert picked(line, "status", "reason") == [200 if stream else 499, "client_gone"]
    assert line["output_tokens"] > 0


@played()
async def test_all_choices_are_one_line(rig: Rig, lines: list[dict[str, Any]]) -> None:
    await rig.client.post(TEXT, text(n=3))
    (line,) = lines
    assert line["output_tokens"] == 3 * 7


@played(Setting(keys=("alice=k",), allowance=Allowance(requests_per_minute=1)))
async def test_rejected_requests_have_their_error_code_as_reason(
    rig: Rig, lines: list[dict[str, Any]]
) -> None:
    for path, key, body in (
        (CHAT, "no", chat()),
        (CHAT, "k", chat(temperature=-1)),
        (CHAT, "k", chat()),
        ("/v1/nothing", "k", {}),
        ("/admin/policy", "k", {}),
    ):
        await rig.client.post(path, body, {"x-api-key": key})
    assert [picked(line, "key", "status", "reason") for line in lines] == [
        ["", 401, "invalid_api_key"],
        ["alice", 400, "invalid_request_error"],
        ["alice", 429, "rate_limit_exceeded"],
        ["alice", 429, "rate_limit_exceeded"],
        ["alice", 403, "permission_denied"],
    ]


@played(Setting(texts=(LONG,)))
async def test_a_superseded_stream_and_the_one_that_goes_on_say_so(
    rig: Rig, lines: list[dict[str, Any]]
) -> None:
    headers = {"idempotency-key": "x"}
    async with rig.client.post(CHAT, chat(stream=True), headers) as earlier:
        await asyncio.sleep(3 * STEP)
        async with rig.client.post(CHAT, chat(stream=True), headers) as later:
            await later.read()
            await earlier.read()
    assert [line["reason"] for line in lines] == ["superseded", "resumed"]
    assert lines[0]["output_tokens"] > lines[1]["output_tokens"] == 0


@played()
async def test_lines_of_a_batch_are_logged(rig: Rig, lines: list[dict[str, Any]]) -> None:
    await ended(rig, await started(rig, chat_lines(2)))
    batch = [line for line in lines if line["method"] == "BATCH"]
    assert [picked(line, "path", "status", "reason", "output_tokens") for line in batch] == [
        [CHAT, 200, "stop", 7]
    ] * 2


def test_probes_that_succeed_are_not_logged(lines: list[dict[str, Any]]) -> None:
    async def scene(rig: Rig) -> None:
        for path in ("/health", "/ready", "/metrics"):
            await rig.client.get(path)
        await rig.client.get("/metrics", {"x-api-key": "no"})

    play(scene)
    assert not lines
    play(scene, Setting(keys=("k",)))
    assert [line["path"] for line in lines] == ["/metrics", "/metrics"]


@played()
async def test_requests_with_the_same_id_are_two_lines(
    rig: Rig, lines: list[dict[str, Any]]
) -> None:
    headers = {"x-request-id": "same"}
    async with rig.client.post(CHAT, chat(), headers) as one:
        await rig.client.post(CHAT, chat(), headers)
        await one.read()
    assert [line["id"] for line in lines] == ["same", "same"]
    assert sum(line["output_tokens"] for line in lines) == 14
    assert not rig.service.request_log._running


@played(Setting(keys=("alice=k",), admin_keys=("root=a",)))
async def test_metrics_count_requests_by_route_and_by_key(rig: Rig) -> None:
    pages: list[str] = []
    key = {"x-api-key": "k"}
    for path, headers in ((CHAT, key), (CHAT, {}), ("/v1/x\"'\n", key), ("/v1/files/a", key)):
        method = "GET" if "files" in path else "POST"
        body = json.dumps(chat()).encode()
        await rig.client.send(method, path, [body], headers)
    await rig.client.send("BREW", "/v1/models", headers=key)
    pages.append((await rig.client.get("/metrics", {"x-api-key": "a"})).content.decode())
    counts = dict(re.findall(r"^podway_((?:http|key)_[^ ]*) ([0-9.]+)$", pages[0], re.M))
    assert counts == {
        f'http_requests_total{{method="POST",path="{CHAT}",status="200"}}': "1.0",
        f'http_requests_total{{method="POST",path="{CHAT}",status="401"}}': "1.0",
        'http_requests_total{method="POST",path="other",status="404"}': "1.0",
        'http_requests_total{method="GET",path="/v1/files/{file_id}",status="404"}': "1.0",
        'http_requests_total{method="other",path="/v1/models",status="405"}': "1.0",
        'key_requests_total{key="",status="401"}': "1.0",
        'key_requests_total{key="alice",status="200"}': "1.0",
        'key_requests_total{key="alice",status="404"}': "2.0",
        'key_requests_total{key="alice",status="405"}': "1.0",
        'key_tokens_total{key="",kind="prompt"}': "0.0",
        'key_tokens_total{key="",kind="output"}': "0.0",
        'key_tokens_total{key="alice",kind="prompt"}': "8.0",
        'key_tokens_total{key="alice",kind="output"}': "7.0",
    }
    for name in ("process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"):
        assert f"\n{name} " in pages[0]


@played()
async def test_vllms_histograms_of_a_request_are_filled(rig: Rig) -> None:
    pages: list[str] = []
    await rig.client.post(CHAT, chat())
    pages.append((await rig.client.get("/metrics")).content.decode())
    sums = dict(re.findall(r"^vllm:(request_\w+)_sum\{[^}]*\} ([0-9.]+)$", pages[0], re.M))
    assert sums["request_prompt_tokens"] == "8.0"
    assert sums["request_generation_tokens"] == "7.0"
    assert sums["request_prefill_time_seconds"] == "0.25"
    assert sums["request_decode_time_seconds"] == "1.5"


@played()
async def test_the_trace_id_of_a_router_is_in_the_line(
    rig: Rig, lines: list[dict[str, Any]]
) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    for value in (f"00-{trace}-00f067aa0ba902b7-01", f"00-{'0' * 32}-00f067aa0ba902b7-01", "x"):
        await rig.client.get("/v1/models", {"traceparent": value})
    assert [line.get("trace_id") for line in lines] == [trace, None, None]


def test_a_client_cannot_add_fields_or_lines() -> None:
    record = RequestRecord("id", 0.0, "GET", '/a b="\n2026 INFO', "::1")
    line = as_text(record.fields(1.0))
    assert "\n" not in line
    assert 'path="/a b=\\"\\n2026 INFO" status=0' in line


def test_json_lines_have_the_fields_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(lambda: 2.0)
    with caplog.at_level(logging.INFO):
        log.close(RequestRecord("id", 0.5, "GET", "/v1/models", "::1", status=200))
        logging.getLogger("other").warning("a %s", "message")
    request, other = (json.loads(JsonFormatter().format(each)) for each in caplog.records)
    assert request["id"] == "id"
    assert (request["jct"], request["ttft"], request["status"]) == (1.5, None, 200)
    assert "message" not in request
    assert (other["message"], other["level"], other["logger"]) == ("a message", "warning", "other")
    (line,) = (json.loads(JsonFormatter(worker=7).format(each)) for each in caplog.records[1:])
    assert line["worker"] == 7
