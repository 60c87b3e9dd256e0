"""Requests to the Responses API of a rig."""

from typing import Any

from adapters.dialects.choosing import choose_dialect
from tests.gateway.rig import MODEL, Rig

PATH = "/v1/responses"
HERMES = choose_dialect("", "hermes", "think")


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hi", **fields}


async def created(rig: Rig, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    exchange = await rig.client.post(PATH, ask(**fields), headers)
    result = exchange.json
    assert exchange.status == 200, result
    return result


async def got(rig: Rig, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    exchange = await rig.client.get(f"{PATH}/{path}", headers)
    return exchange.status, exchange.json
