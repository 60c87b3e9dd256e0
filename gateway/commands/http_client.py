"""An HTTP client for OpenAI-compatible servers: addresses, sessions, server-sent events, errors.

Works with any such server. Every failure is a `ServerError` whose text is one readable line.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

DEFAULT_URL = "http://127.0.0.1:8000"
DONE = b"[DONE]"
_MAX_LINE = 1 << 20  # bytes
_MAX_MESSAGE = 300  # characters


class ServerError(Exception):
    """The server rejected a request, failed, or cannot be reached. `status` is that of an HTTP
    response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EventDecoder:
    """Splits a stream of bytes into the payloads of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The payloads that this chunk completes; comments and other fields are skipped."""
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
    """The address without a trailing slash or `/v1`; `host:port` alone means http."""
    if "://" not in url:
        url = "http://" + url
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def open_session(
    api_key: str | None, *, timeout: float | None = None, reuse_connections: bool = True
) -> aiohttp.ClientSession:
    """A session without a limit on connections; `timeout` is for a whole request, in seconds.
    Raises `ServerError` for a key that no header can have."""
    key = (api_key or os.environ.get("OPENAI_API_KEY", "")).strip()
    if not key.isprintable():
        raise ServerError("the API key has a control character, such as the end of a line")
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"} if key else None,
        connector=aiohttp.TCPConnector(limit=0, force_close=not reuse_connections),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=30),
        read_bufsize=_MAX_LINE,
    )


@asynccontextmanager
async def answered(
    session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response with status 200 to a GET, or to a POST of `body`. Raises `ServerError`, also if
    the connection is lost within the block."""
    try:
        method = "GET" if body is None else "POST"
        async with session.request(method, f"{url}{path}", json=body) as response:
            if response.status != 200:
                text = http_error(response.status, await response.read())
                raise ServerError(text, response.status)
            yield response
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerError(connection_error(url, error)) from error


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The id of the first model that the server lists."""
    try:
        async with answered(session, url, "/v1/models") as response:
            return str(orjson.loads(await response.read())["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise ServerError(f"{url}/v1/models lists no model; set one with --model") from error


def http_error(status: int, body: bytes) -> str:
    """One line for a response whose status is not 200."""
    try:
        message = error_text(orjson.loads(body)["error"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        message = " ".join(body.decode(errors="replace").split())[:_MAX_MESSAGE]
    return f"HTTP {status}: {message or 'no reason given'}"


def error_text(error: Any) -> str:
    """The message of an OpenAI error object, on one line."""
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:_MAX_MESSAGE]


def connection_error(url: str, error: BaseException) -> str:
    """One line for a connection that could not be opened or was lost."""
    if isinstance(error, TimeoutError):
        return f"{url} did not answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            f"cannot verify the certificate of {url} ({error.certificate_error}); if it is "
            "self-signed, set SSL_CERT_FILE to the PEM file of the certificate"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # negative where a name has no address
        reason = os.strerror(number) if number and number > 0 else error.os_error.strerror
        return f"cannot reach {url}: {reason or error.os_error}"
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return f"{url} is not an address such as {DEFAULT_URL}"
    return f"the connection to {url} was lost: {error or type(error).__name__}"
