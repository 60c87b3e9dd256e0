"""Multipart forms as a client writes them, and batches as files."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tests.gateway.rig import CHAT, Rig, chat
from tests.wire.asgi import Client, Exchange

BOUNDARY = "----a-boundary"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
ENDED = ("completed", "failed", "cancelled", "expired")


def a_form(
    content: bytes | None, fields: Mapping[str, str] | None = None, name: str = "in.jsonl"
) -> bytes:
    """The fields, then the file if there is one."""
    fields = {"purpose": "batch"} if fields is None else fields
    parts = [
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode()
        for key, value in fields.items()
    ]
    if content is not None:
        head = f'content-disposition: form-data; name="file"; filename="{name}"\r\n'
        parts.append(f"--{BOUNDARY}\r\n{head}\r\n".encode() + content + b"\r\n")
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def upload(client: Client, form: bytes, headers: Mapping[str, str] | None = None) -> Exchange:
    return client.post("/v1/files", form, FORM | dict(headers or {}))


def a_line(custom_id: str, body: object, url: str = CHAT, method: str = "POST") -> bytes:
    return orjson.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def chat_lines(count: int, **fields: Any) -> bytes:
    """So many good lines."""
    return b"\n".join(a_line(f"line-{i}", chat(**fields)) for i in range(count))


async def uploaded(rig: Rig, content: bytes, headers: Mapping[str, str] | None = None) -> str:
    """The id of a new file with that content."""
    async with upload(rig.client, a_form(content), headers) as exchange:
        result = await exchange.json()
    assert exchange.status == 200, result
    return str(result["id"])


async def started(
    rig: Rig, content: bytes, headers: Mapping[str, str] | None = None, **fields: Any
) -> str:
    """The id of a new batch over that content."""
    file_id = await uploaded(rig, content, headers)
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h", **fields}
    exchange = await rig.client.post("/v1/batches", body, headers)
    result = exchange.json
    assert exchange.status == 200, result
    assert result["status"] == "validating"
    return str(result["id"])


async def batch_of(rig: Rig, batch_id: str) -> dict[str, Any]:
    exchange = await rig.client.get(f"/v1/batches/{batch_id}")
    result: dict[str, Any] = exchange.json
    assert exchange.status == 200, result
    return result


async def ended(rig: Rig, batch_id: str, every: float = 1.0) -> dict[str, Any]:
    """The batch at its end; asks once in so many seconds of virtual time."""
    for _ in range(1000):
        result = await batch_of(rig, batch_id)
        if result["status"] in ENDED:
            return result
        await asyncio.sleep(every)
    raise AssertionError(f"it does not end: {result}")


async def lines_of(rig: Rig, file_id: str) -> Sequence[dict[str, Any]]:
    """The lines of an output file, parsed."""
    exchange = await rig.client.get(f"/v1/files/{file_id}/content")
    content = exchange.content
    assert exchange.status == 200, content
    assert exchange.headers["content-length"] == str(len(content))
    return [orjson.loads(line) for line in content.splitlines()]
