import asyncio
from typing import Any

import pytest

from gateway.schema.openai.chat import MAX_MESSAGES
from tests.gateway.rig import CHAT, CONTEXT, MODEL, USER, Rig, Setting, chat, played
from tests.gateway.scripted_model import END

RENDER = f"{CHAT}/render"


async def posted(rig: Rig, path: str, body: object) -> Any:
    return (await rig.client.post(path, body)).json


@played()
async def test_tokenize_returns_the_ids_of_a_prompt(rig: Rig) -> None:
    result = await posted(rig, "/tokenize", {"model": MODEL, "prompt": "aä"})
    ids = list("aä".encode())
    assert result == {
        "count": 3,
        "max_model_len": CONTEXT,
        "tokens": ids,
        "token_strs": None,
    }
    plain = await posted(rig, "/tokenize", {"prompt": "aä", "add_special_tokens": False})
    assert plain["tokens"] == ids


@played(Setting(num_blocks=3))
async def test_the_longest_request_is_what_the_kv_cache_holds_if_that_is_less(rig: Rig) -> None:
    """Clients fill this context; the last token needs no slot."""
    tokens = await posted(rig, "/tokenize", {"prompt": "aä"})
    longest = tokens["max_model_len"]
    assert longest < CONTEXT
    rendered = await posted(rig, RENDER, chat(max_tokens=5))
    (model,) = (await rig.client.get("/v1/models")).json["data"][:1]
    assert rendered["max_model_len"] == model["max_model_len"] == longest
    for count, status in ((longest - 1, 200), (longest, 400)):
        body = {"model": MODEL, "prompt": "a" * count, "max_tokens": 1}
        assert (await rig.client.post("/v1/completions", body)).status == status


@played()
async def test_tokenize_returns_token_strings_if_requested(rig: Rig) -> None:
    result = await posted(rig, "/tokenize", {"prompt": "aä", "return_token_strs": True})
    assert result["token_strs"] == ["a", "\ufffd", "\ufffd"]


@played()
async def test_tokenize_renders_messages(rig: Rig) -> None:
    result = await posted(rig, "/tokenize", {"messages": USER})
    assert bytes(result["tokens"]) == b"user:hi\n"
    rendered = await posted(rig, RENDER, chat(max_tokens=5))
    assert rendered["token_ids"] == result["tokens"]
    assert rendered["prompt"] == "user:hi\n"
    assert rendered["count"] == result["count"] == 8
    assert not rig.ended


@played()
async def test_the_rendered_prompt_is_the_prompt_that_is_computed(rig: Rig) -> None:
    rendered = await posted(rig, RENDER, chat())
    await posted(rig, CHAT, chat())
    assert rig.ended[0].spec.prompt == tuple(rendered["token_ids"])


@played()
async def test_detokenize_returns_text_with_control_tokens(rig: Rig) -> None:
    ids = [*"aä".encode(), END, *b"b"]
    result = await posted(rig, "/detokenize", {"model": MODEL, "tokens": ids})
    special = rig.service.model.tokenizer.token_bytes(END).decode()
    assert result == {"prompt": f"aä{special}b"}
    assert await posted(rig, "/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/detokenize", {"tokens": [1, END + 1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
        (RENDER, {"model": MODEL}, "messages"),
        (RENDER, {"model": "x", "messages": USER}, "model"),
    ],
)
@played()
async def test_the_error_names_the_invalid_field(
    rig: Rig, path: str, body: object, param: str
) -> None:
    error = (await posted(rig, path, body))["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@played()
async def test_a_request_with_neither_field_is_not_told_that_both_are_too_many(rig: Rig) -> None:
    error = (await posted(rig, "/tokenize", {}))["error"]
    assert error["message"] == "Send 'prompt' or 'messages'."


@played()
async def test_the_error_names_text_with_an_unpaired_surrogate(rig: Rig) -> None:
    for field in (b'"prompt":"\\ud800"', b'"prompt":"\\ud800","add_special_tokens":false'):
        error = (await posted(rig, "/tokenize", b"{" + field + b"}"))["error"]
        assert error["type"] == "invalid_request_error"


@played(run=asyncio.run)
async def test_more_messages_than_allowed_are_rejected_before_each_is_checked(rig: Rig) -> None:
    wrong = {"role": "wrong", "content": "x"}
    exchange = await rig.client.post(CHAT, chat(messages=[wrong] * (MAX_MESSAGES + 1)))
    error = exchange.json["error"]
    assert (exchange.status, error["param"]) == (400, "messages")
    assert "expected at most 16384 messages, but got 16385" in error["message"]
