import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.store.files import PIECE_BYTES
from gateway.store.usage import StoreLimits
from tests.gateway.answers import answer_to
from tests.gateway.forms import BOUNDARY, FORM, a_form, upload, uploaded
from tests.gateway.rig import EPOCH, Rig, Setting, key, play, played

SMALL = StoreLimits(file_bytes=3 * PIECE_BYTES, tenant_bytes=5 * PIECE_BYTES)


async def listed(rig: Rig, query: str = "", headers: dict[str, str] | None = None) -> Any:
    return (await rig.client.get(f"/v1/files{query}", headers)).json


@played()
async def test_an_uploaded_file_is_downloaded_in_pieces(rig: Rig) -> None:
    content = bytes(range(256)) * (9 * PIECE_BYTES // 1024)
    result = (await upload(rig.client, a_form(content, name="mine.jsonl"))).json
    assert result | {"id": ""} == {
        "id": "",
        "object": "file",
        "bytes": len(content),
        "created_at": EPOCH,
        "filename": "mine.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert (await rig.client.get(f"/v1/files/{result['id']}")).json == result
    async with rig.client.get(f"/v1/files/{result['id']}/content") as exchange:
        pieces = [piece async for piece in exchange.chunks()]
    assert len(pieces) == 3
    assert b"".join(pieces) == content
    assert exchange.headers["content-length"] == str(len(content))


@played()
async def test_files_are_listed_in_pages(rig: Rig) -> None:
    assert await listed(rig) == {
        "object": "list",
        "data": [],
        "first_id": "",
        "last_id": "",
        "has_more": False,
    }
    ids = [await uploaded(rig, b"x") for _ in range(5)]
    assert [f["id"] for f in (await listed(rig))["data"]] == ids[::-1]
    page = await listed(rig, f"?limit=2&order=asc&after={ids[0]}")
    assert [f["id"] for f in page["data"]] == ids[1:3]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (*ids[1:3], True)
    rest = await listed(rig, f"?limit=2&order=asc&after={ids[2]}&purpose=batch")
    assert [f["id"] for f in rest["data"]] == ids[3:]
    assert not rest["has_more"]
    assert (await listed(rig, "?purpose=batch_output"))["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?limit=0", "limit"),
        ("?limit=x", "limit"),
        ("?limit=10001", "limit"),
        ("?order=up", "order"),
        ("?purpose=evals", "purpose"),
        ("?after=file-none", "after"),
    ],
)
@played()
async def test_the_error_names_an_invalid_query_parameter(rig: Rig, query: str, param: str) -> None:
    assert (await listed(rig, query))["error"]["param"] == param


@played()
async def test_a_deleted_file_is_gone(rig: Rig) -> None:
    file_id = await uploaded(rig, b"x" * 10)
    exchange = await rig.client.send("DELETE", f"/v1/files/{file_id}")
    assert exchange.json == {"id": file_id, "object": "file", "deleted": True}
    for method, path in [("GET", ""), ("GET", "/content"), ("DELETE", "")]:
        exchange = await rig.client.send(method, f"/v1/files/{file_id}{path}")
        assert (exchange.status, exchange.json["error"]["code"]) == (404, "file_not_found")


@played()
async def test_an_expired_file_is_gone(rig: Rig) -> None:
    fields = {
        "purpose": "batch",
        "expires_after[anchor]": "created_at",
        "expires_after[seconds]": "3600",
    }
    result = (await upload(rig.client, a_form(b"x", fields))).json
    assert result["expires_at"] == EPOCH + 3600
    await asyncio.sleep(3599)
    assert len((await listed(rig))["data"]) == 1
    await asyncio.sleep(1)
    assert (await listed(rig))["data"] == []


@played(Setting(keys=("a", "b")))
async def test_another_key_cannot_access_it(rig: Rig) -> None:
    file_id = await uploaded(rig, b"x", key("a"))
    for method, path in [("GET", ""), ("GET", "/content"), ("DELETE", "")]:
        path = f"/v1/files/{file_id}{path}"
        assert (await rig.client.send(method, path, headers=key("b"))).status == 404
    assert (await listed(rig, headers=key("b")))["data"] == []
    assert len((await listed(rig, headers=key("a")))["data"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch", "extra": "x"}, "extra"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after"),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "then",
                "expires_after[seconds]": "3600",
            },
            "expires_after.anchor",
        ),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "9",
            },
            "expires_after.seconds",
        ),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "soon",
            },
            "expires_after.seconds",
        ),
    ],
)
@played()
async def test_the_error_names_an_invalid_form_field(
    rig: Rig, fields: dict[str, str], param: str
) -> None:
    exchange = await upload(rig.client, a_form(b"x", fields))
    assert (exchange.status, exchange.json["error"]["param"]) == (400, param)
    assert (await listed(rig))["data"] == []


@pytest.mark.parametrize(
    ("form", "headers", "status"),
    [
        (a_form(None), FORM, 400),
        (a_form(None, {"purpose": "batch", "file": "text"}), FORM, 400),
        (b"no form at all", FORM, 400),
        (a_form(b"x"), {"content-type": "multipart/form-data"}, 400),
        (a_form(b"x", {f"field{i}": "x" for i in range(50)}), FORM, 400),
        (a_form(b"x", {"purpose": "p" * 100_000}), FORM, 400),
        (b"{}", {"content-type": "application/json"}, 415),
    ],
)
def test_a_body_that_is_not_a_form_with_a_file_is_rejected(
    form: bytes, headers: dict[str, str], status: int
) -> None:
    answer = answer_to("/v1/files", form, headers=headers)
    error = answer.json["error"]
    assert (answer.status, error["type"]) == (status, "invalid_request_error"), error


@played()
async def test_two_files_in_one_form_are_rejected(rig: Rig) -> None:
    form = a_form(b"x").replace(f"--{BOUNDARY}--\r\n".encode(), b"") + a_form(b"y", {})
    assert (await upload(rig.client, form)).status == 400


@played(Setting(files=SMALL))
async def test_a_file_that_is_too_large_is_rejected_during_the_upload(rig: Rig) -> None:
    form = a_form(b"x" * (4 * PIECE_BYTES))
    pieces = [form[i : i + 65536] for i in range(0, len(form), 65536)]
    exchange = rig.client.send("POST", "/v1/files", pieces, FORM)
    exchange.hold_back(2)
    async with exchange:
        assert await exchange.start() == 413


@played(Setting(files=SMALL))
async def test_the_total_size_of_a_tenants_files_is_limited(rig: Rig) -> None:
    first = await uploaded(rig, b"x" * 2 * PIECE_BYTES)
    await uploaded(rig, b"x" * 2 * PIECE_BYTES)
    async with upload(rig.client, a_form(b"x" * 2 * PIECE_BYTES)) as exchange:
        error = (await exchange.json())["error"]
    assert (exchange.status, error["code"], error["param"]) == (413, "storage_full", "file")
    await rig.client.send("DELETE", f"/v1/files/{first}")
    await uploaded(rig, b"x" * 2 * PIECE_BYTES)


@played()
async def test_an_interrupted_upload_leaves_nothing(rig: Rig) -> None:
    form = a_form(b"x" * (2 * PIECE_BYTES))
    exchange = rig.client.send("POST", "/v1/files", [form[:100_000], form[100_000:]], FORM)
    exchange.hold_back(1)
    async with exchange:
        await asyncio.sleep(1)
    assert (await listed(rig))["data"] == []


@played()
async def test_a_form_that_does_not_arrive_times_out(rig: Rig) -> None:
    exchange = rig.client.send("POST", "/v1/files", [b"--", b"x"], FORM)
    exchange.hold_back(1)
    async with exchange:
        assert await exchange.start() == 408


@played()
async def test_a_disconnect_ends_a_download(rig: Rig) -> None:
    file_id = await uploaded(rig, b"x" * 3 * PIECE_BYTES)
    async with rig.client.get(f"/v1/files/{file_id}/content") as exchange:
        await exchange.start()
        exchange.pause()
        exchange.disconnect()


def test_files_survive_a_restart(tmp_path: Path) -> None:
    setting = Setting(store=tmp_path / "deep" / "store.sqlite")
    ids: list[str] = []

    async def first(rig: Rig) -> None:
        ids.append(await uploaded(rig, b"to be kept"))

    async def second(rig: Rig) -> None:
        assert (await rig.client.get(f"/v1/files/{ids[0]}/content")).content == b"to be kept"

    play(first, setting)
    play(second, setting)
