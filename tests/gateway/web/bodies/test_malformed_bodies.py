import asyncio

import orjson
import pytest

from tests.gateway.rig import CHAT, MODEL, TEXT, Rig, chat, played

DEEP = 100_000
HEAD = b'{"model":"' + MODEL.encode() + b'","messages":[{"role":"user","content":"hi"}],'

RUBBISH = {
    "nothing": b"",
    "a word": b"hello",
    "half an object": b'{"model":',
    "an array": b"[]",
    "null": b"null",
    "a number": b"1",
    "two objects": b"{}{}",
    "NaN": HEAD + b'"temperature":NaN}',
    "Infinity": HEAD + b'"temperature":-Infinity}',
    "a float beyond floats": HEAD + b'"temperature":1e999}',
    "a huge integer": HEAD + b'"n":' + b"9" * 30 + b"}",
    "an enormous integer": HEAD + b'"max_tokens":' + b"9" * 100_000 + b"}",
    "an enormous negative": HEAD + b'"n":-' + b"9" * 5000 + b"}",
    "a huge seed": HEAD + b'"seed":' + b"9" * 40 + b"}",
    "a huge bias": HEAD + b'"logit_bias":{"1":1e308}}',
    "a huge bias key": HEAD + b'"logit_bias":{"' + b"9" * 9000 + b'":1}}',
    "invalid UTF-8": HEAD + b'"user":"\xff\xfe"}',
    "half a surrogate": HEAD + b'"user":"\\ud800"}',
    "the other half": HEAD.replace(b"hi", b"\\udc00"),
    "a broken pair": HEAD.replace(b"hi", b"\\ud800x") + b'"n":1}',
    "NULs": HEAD.replace(b"hi", b"\\u0000\\u0000") + b'"n":"\\u0000"}',
    "open arrays": b"[" * DEEP,
    "open objects": b'{"a":' * DEEP,
    "1 MB of braces": b"{" * 1_000_000,
    "1 MB of spaces": b" " * 1_000_000,
    "deep in a refused field": HEAD + b'"tool_choice":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "less deep": HEAD + b'"tool_choice":' + b"[" * 900 + b"]" * 900 + b"}",
    "deep in a message": b'{"model":"m","messages":[{"role":"user","content":' + b"[" * DEEP + b"]",
    "deep in an ignored field": HEAD + b'"prompt_cache_options":' + b'{"a":' * DEEP + b"1",
    "a long unknown field": HEAD + b'"' + b"x" * 500_000 + b'":1}',
    "a long role": HEAD.replace(b"user", b"r" * 500_000) + b'"n":1}',
    "a long model": HEAD.replace(MODEL.encode(), b"m" * 500_000) + b'"n":1}',
    "many messages": orjson.dumps(chat(messages=[{"role": "x"}] * 50_000)),
    "a backtick field": HEAD + b'"a`b - at `$.c":1}',
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@played(run=asyncio.run)
async def test_a_malformed_body_is_a_4xx_in_json_and_the_next_request_is_served(
    rig: Rig, path: str
) -> None:
    for name, body in RUBBISH.items():
        exchange = await rig.client.post(path, body)
        error = exchange.json["error"]
        assert exchange.status in (400, 404, 413), (name, exchange.status)
        assert len(error["message"]) < 1000, name
        assert body or error["message"] == "The request body is empty; JSON is expected."
        assert error["type"] == "invalid_request_error", name
    exchange = await rig.client.post(CHAT, chat())
    assert exchange.json["choices"][0]["message"]["content"] == "Hello!"
