"""Attacks with whole requests: bodies that are small or cheap to send and costly to answer."""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp

from examples.benchmarks.attacks.sending import Attack, Attacker

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RANDOM = random.Random(0)
USER = [{"role": "user", "content": "Hi"}]
IDS = [RANDOM.randrange(300, 1300) for _ in range(8000)]
FUNCTION = {"type": "function", "function": {"name": "f"}}
CHOICES = {"type": "string", "enum": [f"v{value}" for value in range(10)]}
PARAMETERS = {"type": "object", "properties": {f"p{at}": CHOICES for at in range(20)}}
DESCRIBED = {"description": "d" * 500, "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": {"name": f"f{at}", **DESCRIBED}} for at in range(128)]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def repeated(path: str, fields: Mapping[str, Any], clients: int = 2) -> Attack:
    """The same body again and again."""

    async def attack(attacker: Attacker) -> None:
        data = json.dumps({"model": attacker.model, **fields}).encode()
        await attacker.repeat(lambda _: attacker.send("POST", path, data), clients)

    return attack


def varied(path: str, make: Callable[[int], Mapping[str, Any]], clients: int = 4) -> Attack:
    """Another body each time."""

    async def attack(attacker: Attacker) -> None:
        async def one(number: int) -> None:
            body = {"model": attacker.model, **make(number)}
            await attacker.send("POST", path, json.dumps(body).encode())

        await attacker.repeat(one, clients)

    return attack


def getting(path: str, clients: int) -> Attack:
    async def attack(attacker: Attacker) -> None:
        await attacker.repeat(lambda _: attacker.send("GET", path), clients)

    return attack


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, "max_tokens": 1, **fields}


def says(content: object) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": content}])


def prompt(value: object, **fields: Any) -> dict[str, Any]:
    return {"prompt": value, "max_tokens": 1, **fields}


async def live_readers(attacker: Attacker) -> None:
    """40 clients of the live view."""

    async def one(_: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await attacker.send("GET", "/admin/live")

    await attacker.repeat(one, 40)


async def abandoned(attacker: Attacker) -> None:
    """Streams whose client leaves after 50 ms."""
    fields = chat(model=attacker.model, max_tokens=2000, ignore_eos=True, stream=True)
    data = json.dumps(fields).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)

    async def one(number: int) -> None:
        try:
            _, writer = await attacker.connect()
            writer.write(head + data)
            await asyncio.sleep(0.05)
            writer.transport.abort()
            attacker.outcomes["streams"] += 1
        except OSError as error:
            attacker.outcomes[type(error).__name__] += 1

    await attacker.repeat(one, 16)


async def unread(attacker: Attacker) -> None:
    """40 streams that are not read."""
    fields = chat(max_tokens=4000, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20)
    data = json.dumps({"model": attacker.model, **fields}).encode()

    async def one(_: int) -> None:
        async with attacker.session.post(
            attacker.url + CHAT, data=data, headers={"content-type": "application/json"}
        ) as response:
            response.connection.transport.pause_reading()  # type: ignore[union-attr] # it is open
            attacker.outcomes[str(response.status)] += 1
            await attacker.until_over()

    with contextlib.suppress(aiohttp.ClientError):
        await attacker.repeat(one, 40)


def stored(num_items: int, num_bytes: int, clients: int, *, adds: bool) -> Attack:
    """A conversation of so many items, each of so many bytes, which is read or added to."""

    async def attack(attacker: Attacker) -> None:
        item = {"type": "message", "role": "user", "content": "a" * num_bytes}
        made = await attacker.post("/v1/conversations", {"items": [item] * min(20, num_items)})
        path = f"/v1/conversations/{made['id']}"
        for _ in range(20, num_items, 20):
            await attacker.post(f"{path}/items", {"items": [item] * 20})
        one = json.dumps({"items": [item | {"content": "a"}]}).encode()
        await attacker.repeat(
            lambda _: (
                attacker.send("POST", f"{path}/items", one) if adds else attacker.send("GET", path)
            ),
            clients,
        )

    return attack


def schema(number: int) -> dict[str, Any]:
    values = [f"{number}{value}xxxxxxxx" for value in range(4000)]
    named = {"name": "x", "schema": {"enum": values}}
    return chat(max_tokens=30, response_format={"type": "json_schema", "json_schema": named})


def bomb(number: int) -> dict[str, Any]:
    regex = f"(.*a.{{{10 + number % 30}}})+.*b.{{{10 + number % 29}}}"
    return chat(
        max_tokens=300, min_tokens=290, ignore_eos=True, structured_outputs={"regex": regex}
    )


def bad_words(number: int) -> dict[str, Any]:
    words = ["".join(RANDOM.choices("abcdefghij e", k=100)) for _ in range(120)]
    return chat(max_tokens=300, ignore_eos=True, bad_words=words)


LOGPROBS = {"logprobs": True, "top_logprobs": 20}
ATTACKS: Mapping[str, Attack] = {
    "2,048 prompts, n = 128": repeated(COMPLETIONS, prompt(["a"] * 2048, n=128)),
    "2,048 prompts": repeated(COMPLETIONS, prompt([f"hi {n}" for n in range(2048)])),
    "n = 128": repeated(CHAT, chat(max_tokens=300, ignore_eos=True, n=128)),
    "16,000 unknown fields": repeated(
        CHAT, chat(messages=[{"role": "user", "content": "x", f"z{n}": 1} for n in range(16_000)])
    ),
    "30,000 tool calls": repeated(
        CHAT, chat(messages=[{"role": "assistant", "tool_calls": [CALL] * 30_000}])
    ),
    "7,000 input items, truncation auto": repeated(
        "/v1/responses",
        {"input": [{"role": "user", "content": "a"}] * 7000, "truncation": "auto",
         "max_output_tokens": 16},
    ),
    "a stop string of 500,000": repeated(CHAT, chat(stop="a" * 500_000, n=8)),
    "16 stop strings of 950": repeated(
        CHAT, chat(max_tokens=3000, ignore_eos=True, stop=["a" * 949 + "b"] * 16), 8
    ),
    "16 MB of newlines": repeated(CHAT, says("\n" * 7_900_000)),
    "2.6 million escapes": repeated(CHAT, says("ä" * 2_600_000)),
    "250,000 empty messages": repeated(CHAT, chat(messages=[{}] * 250_000)),
    "60,000 content parts": repeated(CHAT, says([{"type": "text", "text": "a"}] * 60_000)),
    "2,500 messages": repeated(CHAT, chat(messages=[{"role": "user", "content": "a"}] * 2500)),
    "128 tools": repeated(CHAT, chat(tools=TOOLS), 4),
    "128 tools, one required": varied(
        CHAT,
        lambda n: chat(tools=[{**FUNCTION, "function": {"name": f"g{n}"}}, *TOOLS[:100]],
                       tool_choice="required"),
    ),
    "enum of 4,000": varied(CHAT, schema),
    "regex bomb": varied(CHAT, bomb, 8),
    "120 bad words of 100": varied(CHAT, bad_words, 8),
    "echo and logprobs of 8,000 tokens": repeated(COMPLETIONS, prompt(IDS, echo=True, logprobs=5)),
    "prompt_logprobs = 20": repeated(
        CHAT, {**says("the cat sat. " * 1800), "prompt_logprobs": 20}
    ),
    "top_logprobs = 20": repeated(CHAT, chat(max_tokens=3000, ignore_eos=True, **LOGPROBS), 8),
    "128 long outputs": repeated(CHAT, chat(max_tokens=30_000, ignore_eos=True), 128),
    "a conversation of 14 MB": stored(20, 700_000, 4, adds=False),
    "an item for a conversation of 14 MB": stored(20, 700_000, 4, adds=True),
    "a conversation of 400 items": stored(400, 1, 4, adds=False),
    "unread streams": unread,
    "abandoned streams": abandoned,
    "40 readers of /admin/live": live_readers,
    "/openapi.json": getting("/openapi.json", 4),
    "/metrics": getting("/metrics", 4),
    "/v1/loads": getting("/v1/loads", 8),
    "unknown path": getting("/nope", 16),
    "/detokenize of 250,000": repeated("/detokenize", {"tokens": (IDS * 32)[:250_000]}),
    "/tokenize with strings": repeated(
        "/tokenize", {"prompt": "a b c d e f g " * 9000, "return_token_strs": True}, 4
    ),
    "/render": repeated(
        f"{CHAT}/render", {"messages": [{"role": "user", "content": "a b c d " * 700}] * 15}, 4
    ),
}  # fmt: skip
