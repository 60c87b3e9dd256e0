import asyncio
from typing import Any

import pytest

from tests.gateway.responses.asking import HERMES
from tests.gateway.responses.sockets import CALL, TOOL, connected, prompts, text_of
from tests.gateway.rig import STEP, Rig, Setting, played


@played()
async def test_steering_ends_the_answer_at_a_token_and_goes_on_from_it(rig: Rig) -> None:
    async with connected(rig) as client:
        client.write(input="hi", store=False, metadata={"a": "b"})
        created = await client.until("response.created")
        await client.until("response.output_text.delta")
        running = created["response"]["id"]
        client.write("response.steer", input="stop", previous_response_id=running)
        accepted = await client.until("response.steer.accepted")
        assert accepted["steer"]["previous_response_id"] == running
        ended = (await client.until("response.incomplete"))["response"]
        assert ended["incomplete_details"] == {"reason": "steered"}
        said = text_of(ended)
        assert said in ("H", "He", "Hel", "Hell")
        successor = (await client.until("response.created"))["response"]
        assert successor["previous_response_id"] == running
        assert successor["metadata"] == {"a": "b"}
        await client.until("response.completed")
    assert prompts(rig)[1] == f"user:hi\nassistant:{said}\nuser:stop\n"
    assert rig.ended[1].num_cached >= len("user:hi\n")  # its KV stayed


@played()
async def test_steering_before_the_first_token_begins_the_next_response_at_once(rig: Rig) -> None:
    async with connected(rig) as client:
        client.write(input="hi", store=False)
        await asyncio.sleep(STEP / 2)
        (running,) = rig.service.running._by_id
        items = [{"role": "user", "content": [{"type": "input_text", "text": "now"}]}]
        client.write("response.steer", input=items, previous_response_id=running)
        ended = (await client.until("response.incomplete"))["response"]
        assert ended["output"] == []
        last = await client.until("response.completed")
        assert last["response"]["previous_response_id"] == running
    assert prompts(rig) == ["user:hi\n", "user:hi\nuser:now\n"]


@played(Setting(texts=(CALL, "Three."), dialect=HERMES, context=400))
async def test_steering_a_call_waits_for_its_output_and_comes_before_it(rig: Rig) -> None:
    async with connected(rig) as client:
        client.write(input="hi", store=False, tools=[TOOL])
        running = (await client.until("response.created"))["response"]["id"]
        added = await client.until("response.output_item.added")
        assert added["item"]["type"] == "function_call"
        client.write("response.steer", input="wait", previous_response_id=running)
        done = (await client.until("response.completed"))["response"]
        pending = await client.event()
        assert pending["type"] == "response.steer.pending"
        (stub,) = pending["required_input"]
        call = done["output"][-1]
        assert stub == {
            "type": "function_call_output", "call_id": call["call_id"], "name": "add",
        }  # fmt: skip
        output = {**stub, "output": "3"}
        del output["name"]
        await client.response(
            input=[output], previous_response_id=running, store=False, tools=[TOOL]
        )
    assert prompts(rig)[1].endswith("user:wait\ntool:3\n")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"previous_response_id": "resp_none", "input": "x"}, "response_not_found"),
        ({"previous_response_id": "resp_none", "input": []}, "invalid_input"),
        ({"previous_response_id": "resp_none"}, "invalid_input"),
        (
            {"previous_response_id": "r", "input": [{"role": "system", "content": "x"}]},
            "invalid_input",
        ),
        ({"previous_response_id": "r", "input": "x", "stream_id": "a"}, "invalid_input"),
    ],
)
@played()
async def test_steering_that_is_not_accepted_gets_its_input_back(
    rig: Rig, fields: Any, code: str
) -> None:
    async with connected(rig) as client:
        client.write("response.steer", **fields)
        event = await client.event()
        assert (event["type"], event["error"]["code"]) == ("response.steer.failed", code)
        assert event["steer"].get("input") == fields.get("input")


@played()
async def test_a_completed_response_is_not_steered(rig: Rig) -> None:
    async with connected(rig) as client:
        first = await client.response(input="hi", store=False)
        client.write("response.steer", input="x", previous_response_id=first["id"])
        event = await client.event()
        assert event["error"]["code"] == "response_already_completed"
