"""Attacks over WebSockets for responses, and with streams whose events are held."""

import asyncio
import json

import aiohttp

from examples.benchmarks.attacks.sending import Attack, Attacker

HELD_STREAMS = 2000  # of one run at most
STEERS = 100  # for each response
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\n"
    b"connection: Upgrade\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
MASK = b"\0\0\0\0"  # leaves the payload as it is
TEXT, CONTINUED, PING, FINAL = 0x01, 0x00, 0x09, 0x80


def frame(opcode: int, payload: bytes) -> bytes:
    """A frame of a client with a short payload."""
    assert len(payload) < 126, "longer payloads have another header"
    return bytes((opcode, 0x80 | len(payload))) + MASK + payload


def frames(block: bytes) -> Attack:
    """Four connections that send the same frames again and again, until they are closed."""

    async def attack(attacker: Attacker) -> None:
        async def one(_: int) -> None:
            try:
                reader, writer = await attacker.connect()
            except OSError as error:
                attacker.outcomes[type(error).__name__] += 1
                await asyncio.sleep(0.01)
                return
            reading = asyncio.create_task(_read_all(reader))
            try:
                writer.write(UPGRADE)
                while not attacker.is_over and not reading.done():
                    writer.write(block)
                    await writer.drain()
                    attacker.outcomes["blocks"] += 1
            except OSError as error:
                attacker.outcomes[type(error).__name__] += 1
            finally:
                reading.cancel()
                writer.transport.abort()

        await attacker.repeat(one, 4)

    return attack


async def _read_all(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1 << 20):
            pass
    except OSError:
        return


async def steers(attacker: Attacker) -> None:
    """Steering input for responses in progress, as fast as it is accepted or given back."""

    async def one(_: int) -> None:
        try:
            async with attacker.session.ws_connect(f"{attacker.url}/v1/responses") as socket:
                await _steer(attacker, socket)
        except (aiohttp.ClientError, ConnectionError) as error:
            attacker.outcomes[type(error).__name__] += 1
            await asyncio.sleep(0.01)

    await attacker.repeat(one, 4)


async def _steer(attacker: Attacker, socket: aiohttp.ClientWebSocketResponse) -> None:
    create = {"type": "response.create", "model": attacker.model, "input": "Count.", "store": False}
    await socket.send_json({**create, "max_output_tokens": 64})
    unanswered = 0
    async for message in socket:
        event = json.loads(message.data)
        attacker.outcomes[event["type"]] += 1
        if attacker.is_over or event["type"] == "error":
            return
        if event["type"] == "response.created":
            steer = {"previous_response_id": event["response"]["id"], "input": "More."}
            unanswered += STEERS
            for _ in range(STEERS):
                await socket.send_json({"type": "response.steer", **steer})
        elif event["type"].startswith("response.steer."):
            unanswered -= 1
            if not unanswered:
                await socket.send_json({**create, "max_output_tokens": 64})


async def held_streams(attacker: Attacker) -> None:
    """Streams under ever new names, which are left after their first event and generate on."""

    async def one(number: int) -> None:
        if number >= HELD_STREAMS:
            await attacker.until_over()
            return
        messages = [{"role": "user", "content": f"Count to {number}."}]
        body = {"model": attacker.model, "messages": messages, "max_tokens": 64, "stream": True}
        headers = {"x-conversation-id": f"attack-{number}"}
        url = f"{attacker.url}/v1/chat/completions"
        try:
            async with attacker.session.post(url, json=body, headers=headers) as response:
                attacker.outcomes[str(response.status)] += 1
                await response.content.readany()
        except (aiohttp.ClientError, ConnectionError) as error:
            attacker.outcomes[type(error).__name__] += 1

    await attacker.repeat(one, 16)


ATTACKS: dict[str, Attack] = {
    "WebSocket: empty frames": frames(frame(FINAL | TEXT, b"") * 8192),
    "WebSocket: messages of one byte": frames(frame(FINAL | TEXT, b"x") * 8192),
    "WebSocket: a message in fragments of one byte": frames(
        frame(TEXT, b"{") + frame(CONTINUED, b" ") * 16384
    ),
    "WebSocket: pings": frames(frame(FINAL | PING, b"p") * 8192),
    "WebSocket: steering": steers,
    "held streams that are left": held_streams,
}
