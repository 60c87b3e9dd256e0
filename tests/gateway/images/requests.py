"""Requests with images, and what the scripted decoder has seen of them."""

import base64
from collections.abc import Mapping
from itertools import chain
from typing import Any

from tests.gateway.rig import Rig, chat
from tests.gateway.scripted_model import END, ScriptedDecoder

RED, BLUE = b"red pixels", b"blue pixels"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
Json = dict[str, Any]


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes, **fields: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


def text(content: str) -> Json:
    return {"type": "text", "text": content}


def ask(*content: Json, role: str = "user", **fields: Any) -> Json:
    return chat(messages=[{"role": role, "content": list(content), **fields}])


def seen(rig: Rig) -> list[tuple[bytes, int]]:
    assert rig.service.model.images is not None
    decoder = rig.service.model.images.decoder
    assert isinstance(decoder, ScriptedDecoder), "from the setting"
    return decoder.seen


def ids(*pieces: str | int) -> tuple[int, ...]:
    """The ids of texts, and so many tokens of an image."""
    lists = (list(p.encode()) if isinstance(p, str) else [END] * p for p in pieces)
    return tuple(chain.from_iterable(lists))


async def answer_of(
    rig: Rig, path: str, body: Json, headers: Mapping[str, str] | None = None
) -> Json:
    exchange = await rig.client.post(path, body, headers)
    answer: Json = exchange.json
    assert exchange.status == 200, answer
    return answer


async def error_of(
    rig: Rig, path: str, body: Json, status: int = 400, headers: Mapping[str, str] | None = None
) -> Json:
    exchange = await rig.client.post(path, body, headers)
    error: Json = exchange.json["error"]
    assert exchange.status == status, error
    for word in ("0x", "/usr", "PIL", "Traceback", "object at"):
        assert word not in error["message"]
    return error
