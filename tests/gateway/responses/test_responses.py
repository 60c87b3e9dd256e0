import asyncio
from typing import Any

import pytest

from engine.request import Abort
from tests.gateway.forms import a_line, ended, lines_of, started
from tests.gateway.responses.asking import HERMES, PATH, ask, created, got
from tests.gateway.rig import EPOCH, STEP, Rig, Setting, played

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


OPEN_RESPONSES = (  # of Open Responses' ResponseResource, which requires all of them
    "background", "completed_at", "created_at", "error", "frequency_penalty", "id",
    "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "model", "object", "output", "parallel_tool_calls", "presence_penalty",
    "previous_response_id", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier",
    "status", "store", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p",
    "truncation", "usage",
)  # fmt: skip


async def streamed(rig: Rig, **fields: Any) -> list[Any]:
    events = (await rig.client.post(PATH, ask(stream=True, **fields))).events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompts(rig: Rig) -> list[str]:
    return [bytes(request.spec.prompt).decode() for request in rig.ended]


def texts(response: Any) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


@played()
async def test_a_text_input_gets_one_message(rig: Rig) -> None:
    fields: dict[str, Any] = {"user": "me", "reasoning": {"mode": "standard"}}
    result = await created(rig, instructions="Be brief.", metadata={"a": "b"}, **fields)
    assert result["status"] == "completed"
    assert result["object"] == "response"
    assert result["created_at"] == EPOCH
    assert result["completed_at"] == EPOCH + 1
    assert (result["metadata"], result["user"]) == ({"a": "b"}, "me")
    assert result["instructions"] == "Be brief."
    (item,) = result["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert texts(result) == "Hello!"
    prompt = "system:Be brief.\nuser:hi\n"
    assert result["usage"]["input_tokens"] == len(prompt)
    assert result["usage"]["output_tokens"] == len("Hello!") + 1
    assert prompts(rig) == [prompt]


@played()
async def test_the_events_of_a_text_are_in_order_and_assemble_to_the_response(rig: Rig) -> None:
    events = await streamed(rig)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len("Hello!"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(e["delta"] for e in events if "delta" in e) == "Hello!"
    last = events[-1]["response"]
    assert texts(last) == "Hello!"
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[-2]["item"] == last["output"][0]
    assert await got(rig, last["id"]) == (200, last)
    whole = await created(rig)
    fresh = {"id", "created_at", "completed_at", "output", "usage"}
    assert {k: last[k] for k in last.keys() - fresh} == {k: whole[k] for k in whole.keys() - fresh}


@played()
async def test_a_response_has_the_fields_of_open_responses_in_each_of_its_events(rig: Rig) -> None:
    events = await streamed(rig, store=False, presence_penalty=0.5)
    responses = [event["response"] for event in events if "response" in event]
    assert [response["status"] for response in responses] == [
        *("in_progress", "in_progress", "completed")
    ]
    for response in responses:
        assert response.keys() == {*OPEN_RESPONSES}
        assert (response["store"], response["presence_penalty"]) == (False, 0.5)
        assert response["frequency_penalty"] == 0
    assert responses[0]["usage"] is responses[0]["completed_at"] is None
    assert (await created(rig))["store"]


@pytest.mark.parametrize("stream", [False, True])
@played()
async def test_a_response_cut_by_max_output_tokens_is_incomplete(rig: Rig, stream: bool) -> None:
    if stream:
        *_, last = await streamed(rig, max_output_tokens=3)
        assert last["type"] == "response.incomplete"
        result = last["response"]
    else:
        result = await created(rig, max_output_tokens=3)
    assert result["status"] == "incomplete"
    assert result["incomplete_details"] == {"reason": "max_output_tokens"}
    assert result["output"][0]["status"] == "incomplete"
    assert texts(result) == "Hel"


THOUGHT = "<think>Hm.</think>Well."


@pytest.mark.parametrize("stream", [False, True])
@played(Setting(texts=(THOUGHT + CALL,), dialect=HERMES))
async def test_reasoning_text_and_calls_are_separate_items(rig: Rig, stream: bool) -> None:
    if stream:
        events = await streamed(rig, tools=[TOOL])
        result = events[-1]["response"]
        deltas: dict[str, str] = {}
        for event in events:
            if "delta" in event:
                deltas[event["type"]] = deltas.get(event["type"], "") + event["delta"]
        assert deltas == {
            "response.reasoning_text.delta": "Hm.",
            "response.output_text.delta": "Well.",
            "response.function_call_arguments.delta": '{"a": 1}',
        }
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == result["output"]
        indices = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
        assert indices == [0, 1, 2]
    else:
        result = await created(rig, tools=[TOOL])
    thought, message, call = result["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Well."
    assert (call["name"], call["arguments"]) == ("add", '{"a": 1}')
    assert call["status"] == result["status"] == "completed"
    assert result["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@played(Setting(texts=(CALL, "Two."), dialect=HERMES))
async def test_previous_response_id_continues_the_conversation(rig: Rig) -> None:
    first = await created(rig, tools=[TOOL], instructions="Old rules.")
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    second = await created(rig, input=[result], previous_response_id=first["id"])
    third = await created(rig, input="bye", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    assert prompts(rig)[1] == "user:hi\nassistant:\ntool:2\n"
    assert prompts(rig)[2] == "user:hi\nassistant:\ntool:2\nassistant:Two.\nuser:bye\n"
    _, page = await got(rig, f"{third['id']}/input_items?order=asc")
    assert [item["type"] for item in page["data"]] == [
        *("message", "function_call", "function_call_output", "message", "message")
    ]


@played()
async def test_items_are_converted_back_to_their_messages(rig: Rig) -> None:
    items = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    await created(rig, input=items)
    assert prompts(rig) == [
        "developer:Rules.\nuser:a\nassistant:b\ntool:1\ntool:2\nassistant:c\nassistant:d\n"
    ]


@pytest.mark.parametrize(
    ("choice", "must_call"),
    [("required", True), ({"type": "function", "name": "add"}, True), ("none", False)],
)
@played(Setting(texts=(CALL,), dialect=HERMES))
async def test_tool_choice_works_as_in_chat(rig: Rig, choice: Any, must_call: bool) -> None:
    result = await created(rig, tools=[TOOL], tool_choice=choice)
    assert result["tool_choice"] == choice
    assert result["tools"] == [TOOL | {"strict": False}]
    assert (rig.ended[0].spec.grammar is not None) == must_call


@played(Setting(texts=("{}",)))
async def test_a_format_constrains_the_text(rig: Rig) -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    result = await created(rig, text={"format": form})
    assert result["text"]["format"] == form
    await created(rig, text={"format": {"type": "json_object"}})
    await created(rig, text={"format": {"type": "text"}})
    kinds = [request.spec.grammar and request.spec.grammar.kind.value for request in rig.ended]
    assert None not in kinds[:2]
    assert kinds[2] is None


@played()
async def test_logprobs_are_returned_if_included(rig: Rig) -> None:
    include = ["message.output_text.logprobs"]
    events = await streamed(rig, include=include, top_logprobs=2)
    result = events[-1]["response"]
    (part,) = result["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == "Hello!"
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    deltas = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    told_so = [(entry["token"], entry["logprob"]) for each in deltas for entry in each]
    assert told_so == [(entry["token"], entry["logprob"]) for entry in part["logprobs"]]
    whole = await created(rig, include=include, top_logprobs=2)
    assert whole["output"][0]["content"][0]["logprobs"] == part["logprobs"]


LONG = "a long story " * 10


@pytest.mark.parametrize("stream", [False, True])
@played(Setting(texts=(LONG,)))
async def test_a_disconnect_ends_the_request_and_stores_nothing(rig: Rig, stream: bool) -> None:
    async with rig.client.post(PATH, ask(stream=stream)):
        await asyncio.sleep(3.5 * STEP)
    await asyncio.sleep(STEP)
    assert [request.abort for request in rig.ended] == [Abort.CLIENT_GONE]


@played(Setting(texts=(LONG,)))
async def test_a_running_response_is_cancelled_by_its_id(rig: Rig) -> None:
    async with rig.client.post(PATH, ask(stream=True)) as exchange:
        events = exchange.events()
        response_id = (await anext(events))["response"]["id"]
        cancelling = await rig.client.post(f"{PATH}/{response_id}/cancel", b"")
        assert (cancelling.status, cancelling.json["status"]) == (200, "cancelled")
        *_, last = [event async for event in events]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "cancelled"
    done = await created(rig, max_output_tokens=1)
    assert (await rig.client.post(f"{PATH}/{done['id']}/cancel", b"")).status == 400
    assert (await rig.client.post(f"{PATH}/{response_id}/cancel", b"")).status == 404
    assert rig.ended[0].abort is Abort.EXPLICIT


@played(Setting(texts=(LONG,)))
async def test_a_failing_stream_ends_with_an_error_event(rig: Rig) -> None:
    async with rig.client.post(PATH, ask(stream=True)) as exchange:
        await exchange.start()
        await rig.service.groups.drain(0)
        *_, last = [event async for event in exchange.events()]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"


@played()
async def test_truncation_auto_drops_the_oldest_items(rig: Rig) -> None:
    items = [
        {"role": "system", "content": "Rules."},
        *({"role": "user", "content": f"{i}" * 20} for i in range(10)),
    ]
    exchange = await rig.client.post(PATH, ask(input=items))
    assert (exchange.status, exchange.json["error"]["param"]) == (400, "input")
    result = await created(rig, input=items, truncation="auto", max_output_tokens=20)
    assert result["truncation"] == "auto"
    (prompt,) = prompts(rig)
    assert prompt.startswith("system:Rules.\nuser:4")
    assert prompt.endswith("user:" + "9" * 20 + "\n")
    assert 180 - 26 < len(prompt) <= 180
    body = ask(input="x" * 300, truncation="auto")
    assert (await rig.client.post(PATH, body)).status == 400


@played()
async def test_lines_of_a_batch_can_be_responses(rig: Rig) -> None:
    lines = [a_line("a", ask(), url=PATH), a_line("b", ask(background=True), url=PATH)]
    result = await ended(rig, await started(rig, b"\n".join(lines), endpoint=PATH))
    (line,) = await lines_of(rig, result["output_file_id"])
    answer = line["response"]["body"]
    assert texts(answer) == "Hello!"
    assert result["usage"]["output_tokens"] == answer["usage"]["output_tokens"]
    assert (await got(rig, answer["id"]))[0] == 200
    (error,) = await lines_of(rig, result["error_file_id"])
    assert error["response"]["body"]["error"]["param"] == "background"
