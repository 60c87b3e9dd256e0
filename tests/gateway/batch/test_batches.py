import asyncio
from codecs import BOM_UTF8
from typing import Any

import pytest

from engine.control.admission import Admission
from engine.pooling import PoolingReport
from gateway.batch.lines import LineLimits
from gateway.store.batches import MAX_LIVE
from tests.gateway.forms import (
    a_line,
    batch_of,
    chat_lines,
    ended,
    lines_of,
    started,
    uploaded,
)
from tests.gateway.rig import CHAT, EPOCH, MODEL, STEP, TEXT, Rig, Setting, chat, play, played, text

LONG = "a long story " * 10
DAY = 86_400


async def create(rig: Rig, **fields: Any) -> Any:
    async with rig.client.post("/v1/batches", fields) as exchange:
        return exchange, await exchange.json()


@played()
async def test_a_batch_runs_to_its_end_and_answers_every_line(rig: Rig) -> None:
    content = b"\n\n".join(
        [
            a_line("good", chat()),
            a_line("short", chat(max_tokens=2)),
            a_line("wrong", chat(temperature=9)),
            a_line("other", {**chat(), "model": "gpt-4o"}),
            a_line("stream", chat(stream=True)),
            a_line("many", chat(n=2)),
        ]
    )
    batch_id = await started(rig, content, metadata={"for": "me"})
    batch = await ended(rig, batch_id)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 6, "completed": 3, "failed": 3}
    assert batch["metadata"] == {"for": "me"}
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"]
    assert batch["finalizing_at"] <= batch["completed_at"] < batch["expires_at"] == EPOCH + DAY
    output = await lines_of(rig, batch["output_file_id"])
    assert [line["custom_id"] for line in output] == ["good", "short", "many"]
    good, short, many = (line["response"] for line in output)
    assert all(line["error"] is None for line in output)
    assert good["status_code"] == 200
    assert good["body"]["object"] == "chat.completion"
    assert good["body"]["choices"][0]["message"]["content"] == "Hello!"
    assert short["body"]["choices"][0]["finish_reason"] == "length"
    assert len(many["body"]["choices"]) == 2
    assert len({line["id"] for line in output}) == 3
    usage = [answer["body"]["usage"] for answer in (good, short, many)]
    assert batch["usage"]["output_tokens"] == sum(u["completion_tokens"] for u in usage)
    assert batch["usage"]["input_tokens"] == sum(u["prompt_tokens"] for u in usage)
    errors = await lines_of(rig, batch["error_file_id"])
    assert [(e["custom_id"], e["response"]["status_code"]) for e in errors] == [
        ("wrong", 400),
        ("other", 404),
        ("stream", 400),
    ]
    params = [e["response"]["body"]["error"]["param"] for e in errors]
    assert params == ["temperature", "model", "stream"]
    exchange = await rig.client.get(f"/v1/files/{batch['output_file_id']}")
    assert exchange.json["purpose"] == "batch_output"
    assert all(request.spec.is_background for request in rig.ended)


@played()
async def test_a_batch_of_text_completions_runs_too(rig: Rig) -> None:
    content = a_line("one", text(prompt=["ab", "cd"], max_tokens=3), url=TEXT)
    batch_id = await started(rig, content, endpoint=TEXT)
    batch = await ended(rig, batch_id)
    (line,) = await lines_of(rig, batch["output_file_id"])
    assert [c["text"] for c in line["response"]["body"]["choices"]] == ["Hel", "Hel"]


@played(Setting(pooling=PoolingReport("embed", "last", 4)))
async def test_a_batch_of_embeddings_runs_in_the_background_too(rig: Rig) -> None:
    path = "/v1/embeddings"
    body = {"model": MODEL, "input": ["ab", "xyz"]}
    content = b"\n".join([a_line("one", body, url=path), a_line("two", {}, url=path)])
    batch_id = await started(rig, content, endpoint=path)
    batch = await ended(rig, batch_id)
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert batch["usage"]["input_tokens"] == 5
    (line,) = await lines_of(rig, batch["output_file_id"])
    assert [row["embedding"][0] for row in line["response"]["body"]["data"]] == [2, 3]
    assert all(request.spec.is_background for request in rig.ended)


@played()
async def test_a_file_may_begin_with_a_byte_order_mark(rig: Rig) -> None:
    batch = await ended(rig, await started(rig, BOM_UTF8 + chat_lines(2)))
    assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


@played()
async def test_a_lines_answer_equals_the_routes_response_byte_for_byte(rig: Rig) -> None:
    batch_id = await started(rig, chat_lines(1, seed=1))
    batch = await ended(rig, batch_id)
    (line,) = await lines_of(rig, batch["output_file_id"])
    reply = (await rig.client.post(CHAT, chat(seed=1))).json
    fresh = {"id", "created", "usage"}  # the second has its prompt from the cache
    answer = line["response"]["body"]
    assert {k: answer[k] for k in answer.keys() - fresh} == {
        k: reply[k] for k in reply.keys() - fresh
    }


@played(Setting(texts=(LONG,), max_batch_size=1))
async def test_an_interactive_request_runs_before_all_lines(rig: Rig) -> None:
    """A line that runs loses its seat for as long as the other needs it."""
    batch_id = await started(rig, chat_lines(20))
    await asyncio.sleep(3.5 * STEP)
    before = rig.service.clock()
    await rig.client.post(CHAT, chat(max_tokens=40))
    assert rig.service.clock() - before <= 41 * STEP
    assert (await batch_of(rig, batch_id))["request_counts"]["completed"] == 0
    assert (await ended(rig, batch_id))["request_counts"]["completed"] == 20


@played(Setting(max_batch_size=4))
async def test_the_number_of_lines_in_the_engine_is_bounded(rig: Rig) -> None:
    batch_id = await started(rig, chat_lines(50))
    most = 0
    while (await batch_of(rig, batch_id))["status"] in ("validating", "in_progress"):
        most = max(most, len(rig.engine.scheduler.pool))
        await asyncio.sleep(STEP)
    assert most == 4
    assert (await ended(rig, batch_id))["request_counts"]["completed"] == 50


@played(Setting(max_batch_size=4))
async def test_a_long_batch_does_not_block_a_short_one(rig: Rig) -> None:
    long = await started(rig, chat_lines(100))
    await asyncio.sleep(STEP)
    short = await started(rig, chat_lines(4))
    await ended(rig, short)
    assert (await batch_of(rig, long))["request_counts"]["completed"] < 30
    await ended(rig, long)


@played(Setting(texts=(LONG,), num_blocks=40, admission=Admission.RESERVE, max_queue_requests=1))
async def test_lines_that_find_the_queue_full_are_retried(rig: Rig) -> None:
    """One runs, one waits for its memory, and no more may wait."""
    async with rig.client.post(CHAT, chat(max_tokens=30)) as first:
        await asyncio.sleep(STEP / 2)
        async with rig.client.post(CHAT, chat(max_tokens=30)) as second:
            await asyncio.sleep(STEP)
            batch_id = await started(rig, chat_lines(3, max_tokens=5))
            assert await first.start() == await second.start() == 200
            assert not any(request.spec.is_background for request in rig.ended)
    assert (await ended(rig, batch_id))["request_counts"]["completed"] == 3


@pytest.mark.parametrize("after", [0.0, STEP, 10.5 * STEP])
@played(Setting(max_batch_size=2))
async def test_a_cancelled_batch_keeps_what_is_answered(rig: Rig, after: float) -> None:
    batch_id = await started(rig, chat_lines(20))
    await asyncio.sleep(after)
    exchange = await rig.client.post(f"/v1/batches/{batch_id}/cancel", b"")
    assert exchange.json["status"] == "cancelling"
    batch = await ended(rig, batch_id, every=STEP)
    assert batch["status"] == "cancelled"
    assert batch["cancelling_at"] <= batch["cancelled_at"]
    done = batch["request_counts"]["completed"]
    assert done == (0 if after < 8 * STEP else 2)
    if done:
        assert len(await lines_of(rig, batch["output_file_id"])) == done
    else:
        assert "output_file_id" not in batch
    assert (await rig.client.post(f"/v1/batches/{batch_id}/cancel", b"")).json == batch
    await asyncio.sleep(STEP)
    assert not rig.engine.scheduler.pool


@played(Setting(max_batch_size=1, step=DAY / 20))
async def test_an_expired_batch_reports_the_lines_that_were_not_answered(rig: Rig) -> None:
    batch_id = await started(rig, chat_lines(10))
    batch = await ended(rig, batch_id, every=3600.0)
    assert batch["status"] == "expired"
    assert batch["expired_at"] == batch["expires_at"] == EPOCH + DAY
    assert batch["request_counts"] == {"total": 10, "completed": 2, "failed": 8}
    errors = await lines_of(rig, batch["error_file_id"])
    assert [e["custom_id"] for e in errors] == [f"line-{i}" for i in range(2, 10)]
    assert {e["error"]["code"] for e in errors} == {"batch_expired"}
    assert {e["response"] for e in errors} == {None}
    await asyncio.sleep(DAY / 20)  # the iteration in flight


WRONG_LINES = {
    "invalid_json_line": [
        b"nonsense",
        b"[]",
        b'{"custom_id":"x","method":"POST","url":"/v1/chat/completions"}',
        b'{"custom_id":7,"method":"POST","url":"/v1/chat/completions","body":{}}',
        a_line("x", chat(), url="/v1/moderations"),
        a_line("x", chat(), method="GET"),
        a_line("x", []),
        b"\xff" + a_line("x", chat()),
    ],
    "duplicate_custom_id": [a_line("line-0", chat())],
    "line_too_long": [a_line("x", chat(user="x" * 3000))],
}


@pytest.mark.parametrize(
    ("code", "line"), [(code, line) for code, lines in WRONG_LINES.items() for line in lines]
)
@played(Setting(lines=LineLimits(line_bytes=2000)))
async def test_an_invalid_line_fails_the_batch_with_its_line_number(
    rig: Rig, code: str, line: bytes
) -> None:
    batch_id = await started(rig, chat_lines(2) + b"\n" + line)
    batch = await ended(rig, batch_id)
    assert (batch["status"], batch["failed_at"]) == ("failed", EPOCH)
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == (code, 3)
    assert error["message"]
    assert not rig.ended


@pytest.mark.parametrize(("content", "code"), [(b" ", "empty_file"), (b"\n \n\n", "empty_file")])
@played()
async def test_a_file_without_lines_fails_the_batch(rig: Rig, content: bytes, code: str) -> None:
    batch = await ended(rig, await started(rig, content))
    assert [error["code"] for error in batch["errors"]["data"]] == [code]


@played(Setting(lines=LineLimits(num_lines=20)))
async def test_a_file_with_too_many_lines_fails_the_batch(rig: Rig) -> None:
    batch = await ended(rig, await started(rig, chat_lines(30)))
    (error,) = batch["errors"]["data"]
    assert (error["code"], error["line"]) == ("too_many_lines", 21)


@played()
async def test_only_the_first_hundred_errors_are_listed(rig: Rig) -> None:
    batch = await ended(rig, await started(rig, b"x\n" * 1000))
    assert len(batch["errors"]["data"]) == 100


@played(Setting(max_batch_size=64))
async def test_lines_may_span_pieces_of_the_file(rig: Rig) -> None:
    content = chat_lines(200, user="x" * 4000)
    batch = await ended(rig, await started(rig, content))
    assert batch["request_counts"] == {"total": 200, "completed": 200, "failed": 0}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "then", "seconds": 3600}},
            "output_expires_after.anchor",
        ),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
        ({"extra": 1}, "extra"),
    ],
)
@played()
async def test_an_invalid_field_is_rejected_by_name(
    rig: Rig, fields: dict[str, Any], param: str
) -> None:
    good = {
        "input_file_id": await uploaded(rig, chat_lines(1)),
        "endpoint": CHAT,
        "completion_window": "24h",
    }
    exchange, batch = await create(rig, **(good | fields))
    assert (exchange.status, batch["error"]["param"]) == (400, param)


@played(Setting(max_batch_size=2))
async def test_batches_that_have_not_ended_are_bounded(rig: Rig) -> None:
    file_id = await uploaded(rig, chat_lines(1))
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    for _ in range(MAX_LIVE):
        exchange, _ = await create(rig, **body)
        assert exchange.status == 200
    exchange, batch = await create(rig, **body)
    assert (exchange.status, batch["error"]["code"]) == (429, "batch_limit_exceeded")
    await asyncio.sleep(3600)
    exchange, batch = await create(rig, **body)
    assert exchange.status == 200
    await ended(rig, batch["id"])


@played()
async def test_an_output_file_cannot_be_an_input_file(rig: Rig) -> None:
    batch = await ended(rig, await started(rig, chat_lines(1)))
    exchange, answer = await create(
        rig,
        input_file_id=batch["output_file_id"],
        endpoint=CHAT,
        completion_window="24h",
    )
    assert (exchange.status, answer["error"]["param"]) == (400, "input_file_id")


@played()
async def test_output_files_are_kept_as_long_as_the_batch_says(rig: Rig) -> None:
    expiry = {"anchor": "created_at", "seconds": 7200}
    batch = await ended(rig, await started(rig, chat_lines(1), output_expires_after=expiry))
    file = (await rig.client.get(f"/v1/files/{batch['output_file_id']}")).json
    assert file["expires_at"] - file["created_at"] == 7200


def test_batches_are_listed_in_pages_the_newest_first() -> None:
    async def listed(rig: Rig, query: str) -> Any:
        return (await rig.client.get(f"/v1/batches{query}")).json

    async def scene(rig: Rig) -> None:
        ids = [await started(rig, chat_lines(1)) for _ in range(5)]
        page = await listed(rig, "?limit=2")
        assert [b["id"] for b in page["data"]] == ids[:2:-1]
        assert (page["last_id"], page["has_more"]) == (ids[3], True)
        rest = await listed(rig, f"?after={ids[3]}")
        assert [b["id"] for b in rest["data"]] == ids[2::-1]
        assert not rest["has_more"]
        for query, param in [("?limit=101", "limit"), ("?order=asc", "order")]:
            assert (await listed(rig, query))["error"]["param"] == param
        assert (await listed(rig, "?after=batch_none"))["error"]["param"] == "after"
        for batch_id in ids:
            await ended(rig, batch_id)

    play(scene)
