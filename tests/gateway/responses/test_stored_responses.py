import asyncio
from collections.abc import Sequence
from typing import Any

from gateway.store.responses import ResponseLimits
from tests.gateway.responses.asking import PATH, ask, created, got
from tests.gateway.rig import Rig, Setting, key, play, played


@played()
async def test_a_response_is_stored_unless_store_is_false(rig: Rig) -> None:
    kept, lost = await created(rig), await created(rig, store=False)
    assert await got(rig, kept["id"]) == (200, kept)
    assert (await got(rig, lost["id"]))[0] == 404
    assert (await rig.client.send("DELETE", f"{PATH}/{kept['id']}")).json["deleted"] is True
    for path in ("", "/input_items"):
        status, result = await got(rig, f"{kept['id']}{path}")
        assert (status, result["error"]["code"]) == (404, "response_not_found")
    assert (await rig.client.send("DELETE", f"{PATH}/{kept['id']}")).status == 404


@played(Setting(keys=("a", "b")))
async def test_another_key_cannot_access_it(rig: Rig) -> None:
    kept = await created(rig, key("a"))
    for path in ("", "/input_items"):
        assert (await got(rig, f"{kept['id']}{path}", key("b")))[0] == 404
    body = ask(previous_response_id=kept["id"])
    exchange = await rig.client.post(PATH, body, key("b"))
    assert exchange.status == 400
    error = exchange.json["error"]
    assert error["code"] == "previous_response_not_found"
    assert (await rig.client.send("DELETE", f"{PATH}/{kept['id']}", headers=key("b"))).status == 404
    assert (await got(rig, kept["id"], key("a")))[0] == 200


def test_input_items_are_paged() -> None:
    items = [{"role": "user", "content": str(i)} for i in range(5)]

    def contents(page: Any) -> list[str]:
        return [item["content"][0]["text"] for item in page["data"]]

    async def scene(rig: Rig) -> None:
        result = await created(rig, input=items)
        _, page = await got(rig, f"{result['id']}/input_items?limit=2")
        assert (contents(page), page["has_more"]) == (["4", "3"], True)
        _, rest = await got(rig, f"{result['id']}/input_items?after={page['last_id']}")
        assert (contents(rest), rest["has_more"]) == (["2", "1", "0"], False)
        status, refused = await got(rig, f"{result['id']}/input_items?after=msg_none")
        assert (status, refused["error"]["param"]) == (400, "after")

    play(scene)


async def kept_of(rig: Rig, responses: Sequence[Any]) -> list[bool]:
    return [(await got(rig, response["id"]))[0] == 200 for response in responses]


@played(Setting(responses=ResponseLimits(count=2)))
async def test_the_least_recently_used_responses_are_evicted(rig: Rig) -> None:
    first, second = await created(rig), await created(rig)
    await got(rig, first["id"])
    third = await created(rig)
    assert await kept_of(rig, [first, second, third]) == [True, False, True]


@played(Setting(responses=ResponseLimits(num_bytes=5000)))
async def test_the_total_size_of_responses_is_limited(rig: Rig) -> None:
    responses = [await created(rig, metadata={"a": "x" * 500}) for _ in range(5)]
    assert await kept_of(rig, responses) == [False, False, False, True, True]
    large = await created(rig, metadata={str(i): "x" * 500 for i in range(16)})
    assert await kept_of(rig, [large]) == [False]


@played(Setting(responses=ResponseLimits(seconds=60)))
async def test_responses_expire(rig: Rig) -> None:
    result = await created(rig)
    await asyncio.sleep(57)
    assert await kept_of(rig, [result]) == [True]
    await asyncio.sleep(3)
    assert await kept_of(rig, [result]) == [False]
