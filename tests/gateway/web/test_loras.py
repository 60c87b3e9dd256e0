import asyncio
from typing import Any

import pytest

from engine.lora import LoraReport
from engine.request import RequestSpec
from engine.step import SamplingParams
from gateway.errors import ModelNotFound
from gateway.generation.choices import StreamGroup
from tests.gateway.lora_loader import LOAD_SECONDS
from tests.gateway.rig import CHAT, MODEL, STEP, TEXT, Rig, Setting, chat, played, text
from tests.wire.asgi import Reply

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = "a prompt of many blocks"  # of one token each


async def load(rig: Rig, name: str, path: str = "/loras/one", **fields: Any) -> str:
    response = await rig.client.post(LOAD, {"lora_name": name, "lora_path": path, **fields})
    assert response.status == 200, response.content
    return response.content.decode()


async def unload(rig: Rig, name: str) -> Reply:
    return await rig.client.post(UNLOAD, {"lora_name": name})


@played(Setting(texts=["yes"] * 5))
async def test_a_loaded_adapter_is_a_model_in_every_api(rig: Rig) -> None:
    assert await load(rig, "sql") == "Success: LoRA adapter 'sql' added successfully."
    listed = (await rig.client.get("/v1/models")).json["data"]
    assert [(m["id"], m["root"], m["parent"]) for m in listed] == [
        (MODEL, MODEL, None),
        ("sql", "/loras/one", MODEL),
    ]
    assert (await rig.client.get("/v1/models/sql")).json == listed[1]
    for path, body in (
        (CHAT, chat(model="sql")),
        (TEXT, text(model="sql")),
        ("/v1/responses", {"model": "sql", "input": "hi"}),
        ("/v1/messages", {**chat(model="sql"), "max_tokens": 8}),
    ):
        answer = (await rig.client.post(path, body)).json
        assert answer["model"] == "sql", path
    assert (await rig.client.post("/tokenize", text(model="sql"))).status == 200
    assert (await rig.client.post(TEXT, text())).status == 200
    assert [r.spec.lora and r.spec.lora.name for r in rig.ended] == ["sql"] * 4 + [None]


@played(Setting(texts=["yes"] * 9))
async def test_prefixes_are_not_shared_with_another_adapter_or_other_bytes_of_the_same_name(
    rig: Rig,
) -> None:
    async def cached(model: str) -> int:
        body = text(model=model, prompt=PROMPT)
        usage = (await rig.client.post(TEXT, body)).json["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    whole = len(PROMPT) - 1
    await load(rig, "one")
    assert [await cached(MODEL), await cached(MODEL)] == [0, whole]
    assert [await cached("one"), await cached("one")] == [0, whole]
    await load(rig, "one", "/loras/other bytes", load_inplace=True)
    assert [await cached("one"), await cached("one")] == [0, whole]
    await load(rig, "one", load_inplace=True)
    assert await cached("one") == whole  # the bytes of the first load


@played(Setting(texts=["a long answer"]))
async def test_unloading_waits_for_running_requests_and_rejects_new_ones_at_once(rig: Rig) -> None:
    await load(rig, "sql")
    running = asyncio.ensure_future(rig.client.post(TEXT, text(model="sql")))
    await asyncio.sleep(STEP)
    unloading = asyncio.create_task(unload(rig, "sql"))
    await asyncio.sleep(STEP)
    rejected = await rig.client.post(TEXT, text(model="sql"))
    assert rejected.status == 404
    assert "does not exist" in rejected.json["error"]["message"]
    assert not unloading.done()
    assert rig.loader.loaded
    assert (await running).status == 200
    response = await unloading
    assert response.content == b"Success: LoRA adapter 'sql' removed successfully."
    assert not rig.loader.loaded
    again = await unload(rig, "sql")
    assert (again.status, again.json["error"]["message"]) == (
        404,
        "The LoRA adapter 'sql' is not loaded.",
    )


@played(Setting(texts=["a long answer", "yes"]))
async def test_requests_of_a_replaced_adapter_end_with_it(rig: Rig) -> None:
    await load(rig, "sql")
    running = asyncio.ensure_future(rig.client.post(TEXT, text(model="sql")))
    await asyncio.sleep(STEP)
    await load(rig, "sql", "/loras/two", load_inplace=True)
    assert set(rig.loader.loaded) == {1, 2}
    assert (await rig.client.post(TEXT, text(model="sql"))).status == 200
    assert (await running).status == 200
    await asyncio.sleep(0)
    assert set(rig.loader.loaded) == {2}
    assert [r.spec.lora and r.spec.lora.lora_id for r in rig.ended] == [2, 1]


@played()
async def test_a_load_that_cannot_be_done_is_rejected_and_changes_nothing(rig: Rig) -> None:
    async def rejected(status: int = 400, **body: Any) -> str:
        answer = await rig.client.post(LOAD, body)
        assert answer.status == status
        message: str = answer.json["error"]["message"]
        return message

    assert "bad file" in await rejected(lora_name="x", lora_path="/bad")
    assert "'lora_path'" in await rejected(lora_name="x")
    for name in ("", "a,b", "a\nb", "x" * 257):
        wrong = await rejected(lora_name=name, lora_path="/a")
        assert wrong == "'lora_name' must have 1 to 256 printable characters and no comma."
    assert "'lora_path' is empty" in await rejected(lora_name="x", lora_path="")
    unknown = await rejected(lora_name="x", lora_path="~no-such-user/x")
    assert unknown.startswith("Invalid 'lora_path': ")
    assert "name of the base model" in await rejected(lora_name=MODEL, lora_path="/a")
    assert "worker was lost" in await rejected(503, lora_name="x", lora_path="/lost")
    assert len((await rig.client.get("/v1/models")).json["data"]) == 1
    await load(rig, "one")
    assert "already been loaded" in await rejected(lora_name="one", lora_path="/a")
    await load(rig, "two")
    full = await rejected(lora_name="three", lora_path="/a")
    assert full.startswith("2 LoRA adapters are loaded, and --max-loras allows 2.")
    await unload(rig, "one")
    await load(rig, "three")


@played()
async def test_two_loads_of_one_name_at_once_load_it_once(rig: Rig) -> None:
    body = {"lora_name": "sql", "lora_path": "/loras/one"}
    both = await asyncio.gather(rig.client.post(LOAD, body), rig.client.post(LOAD, body))
    assert sorted(response.status for response in both) == [200, 400]
    assert list(rig.loader.loaded) == [1]


@played(Setting(texts=["yes"]))
async def test_requests_are_served_while_an_adapter_is_loaded(rig: Rig) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    running = asyncio.ensure_future(rig.client.post(TEXT, text()))
    await load(rig, "sql")
    assert loop.time() - began == LOAD_SECONDS
    await running
    assert loop.time() - began == 4 * STEP  # as without the load


@played(Setting(texts=["a long answer", "another"]))
async def test_requests_of_an_adapter_that_restarted_workers_lack_end_with_an_error(
    rig: Rig,
) -> None:
    await load(rig, "sql")
    running = asyncio.ensure_future(rig.client.post(TEXT, text(model="sql")))
    other = asyncio.ensure_future(rig.client.post(TEXT, text()))
    await asyncio.sleep(STEP)
    (spec,) = rig.loader.loaded.values()
    rig.loader.lose(LoraReport(spec.lora_id, error="its files have changed"))
    assert (await running).status == 500
    assert (await other).status == 200
    assert (await rig.client.post(TEXT, text(model="sql"))).status == 404


@played(Setting(keys=["user"], admin_keys=["admin"]))
async def test_loading_needs_an_admin_key_and_counts_against_no_limit(rig: Rig) -> None:
    body = {"lora_name": "sql", "lora_path": "/loras/one"}

    async def status(path: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await rig.client.post(path, body, headers)).status

    for path in (LOAD, UNLOAD):
        assert await status(path, "user") == 403
        assert await status(path, "nothing") == 401
    assert await status(LOAD, "admin") == 200


@played(Setting(texts=["yes"] * 3, max_batch_size=2))
async def test_metrics_name_the_adapters_of_running_and_waiting_requests(rig: Rig) -> None:
    await load(rig, "one")
    await load(rig, "two")
    running = [
        asyncio.ensure_future(rig.client.post(TEXT, text(model=name)))
        for name in ("one", MODEL, "two")
    ]
    await asyncio.sleep(STEP / 2)
    page = (await rig.client.get("/metrics")).content.decode()
    labels = 'max_lora="2",running_lora_adapters="one",waiting_lora_adapters="two"'
    assert f"vllm:lora_requests_info{{{labels}}} 1." in page
    for request in running:
        await request
    page = (await rig.client.get("/metrics")).content.decode()
    assert 'podway_lora_tokens_total{kind="prompt",lora="one"} 2.0' in page
    assert 'running_lora_adapters="",waiting_lora_adapters=""' in page


@played()
async def test_a_request_whose_adapter_is_unloaded_before_it_starts_is_rejected(rig: Rig) -> None:
    await load(rig, "sql")
    adapter = rig.service.lora_of("sql")
    assert adapter is not None
    await unload(rig, "sql")
    await load(rig, "sql")
    response = await rig.client.post(TEXT, text(model="sql"))
    assert response.status == 200
    spec = RequestSpec((1,), 1, SamplingParams(), lora=adapter)
    with StreamGroup(rig.service) as group, pytest.raises(ModelNotFound, match="does not exist"):
        group.open(spec)
