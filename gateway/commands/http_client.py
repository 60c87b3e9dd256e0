"""The client's side of OpenAI's wire: addresses, sessions, server-sent events, errors.

Knows nothing of Podway's own server. Everything that goes wrong on the way is one `ServerError`
whose text is one line for a person.
"""

import os
from collections.abc import Iterator
from typing import Any

import aiohttp
import orjson

DEFAULT_URL = "http://127.0.0.1:8000"
DONE = b"[DONE]"
_LONGEST_LINE = 1 << 20
_LONGEST_MESSAGE = 300


class ServerError(Exception):
    """The server refused, failed or cannot be reached."""


class EventDecoder:
    """Cuts a stream of bytes into the payloads of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The payloads that are complete now, comments and other fields left out."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                payload = b"\n".join(self._data)
                self._data.clear()
                yield payload


def base_url(url: str) -> str:
    """The address without a trailing slash or `/v1`; a bare host:port is taken as http."""
    if "://" not in url:
        url = "http://" + url
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def open_session(
    api_key: str | None, *, timeout: float | None = None, reuse_connections: bool = True
) -> aiohttp.ClientSession:
    """A session for many streams at once; `timeout` bounds one whole request in seconds."""
    key = api_key or os.environ.get("OPENAI_API_KEY")
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else None,
        connector=aiohttp.TCPConnector(limit=0, force_close=not reuse_connections),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=30),
        read_bufsize=_LONGEST_LINE,
    )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The id of the first model that the server lists."""
    try:
        async with session.get(f"{url}/v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise ServerError(refusal(response.status, body))
            return str(orjson.loads(body)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerError(unreachable(url, error)) from error
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise ServerError(f"{url}/v1/models names no model; give one with --model") from error


def refusal(status: int, body: bytes) -> str:
    """One line for an answer that is not 200."""
    try:
        said = error_text(orjson.loads(body)["error"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        said = " ".join(body.decode(errors="replace").split())[:_LONGEST_MESSAGE]
    return f"HTTP {status}: {said or 'no reason given'}"


def error_text(error: Any) -> str:
    """The message of an OpenAI error object, on one line."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:_LONGEST_MESSAGE]


def unreachable(url: str, error: BaseException) -> str:
    """One line for a connection that failed or broke."""
    if isinstance(error, TimeoutError):
        return f"{url} did not answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"cannot reach {url}: {os.strerror(number) if number else error.os_error}"
    return f"the connection to {url} broke: {error or type(error).__name__}"
