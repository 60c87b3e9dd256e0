import asyncio
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from gateway.commands.http_client import (
    EventDecoder,
    ServerError,
    base_url,
    connection_error,
    error_text,
    first_model,
    http_error,
    open_session,
)
from tests.certificates import make_certificate

STREAM = b': hello\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata: one\ndata:two\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_payloads_do_not_depend_on_chunk_boundaries(size: int) -> None:
    decoder = EventDecoder()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [data for piece in pieces for data in decoder.feed(piece)] == PAYLOADS


def test_an_event_is_complete_at_its_blank_line() -> None:
    decoder = EventDecoder()
    assert list(decoder.feed(b"data: x\n")) == []
    assert list(decoder.feed(b"\n")) == [b"x"]


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host:1/", "http://host:1"),
        ("https://host/v1", "https://host"),
        ("https://host/prefix/v1/", "https://host/prefix"),
    ],
)
def test_an_address_may_have_several_forms(given: str, url: str) -> None:
    assert base_url(given) == url


def test_an_http_error_is_one_line_whatever_the_body() -> None:
    assert (
        http_error(503, b'{"error": {"message": "full,\\n come back"}}')
        == "HTTP 503: full, come back"
    )
    assert http_error(502, b"<h1>Bad\ngateway</h1>") == "HTTP 502: <h1>Bad gateway</h1>"
    assert http_error(500, b"\xff") == "HTTP 500: \ufffd"
    assert http_error(400, b"") == "HTTP 400: no reason given"
    assert error_text("plain") == "plain"


def test_a_name_without_an_address_and_a_wrong_scheme_are_one_line_each() -> None:
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    error = aiohttp.ClientConnectorDNSError(Mock(), unknown)
    expected = "cannot reach http://a: Name or service not known"
    assert connection_error("http://a", error) == expected
    expected = "ftp://a is not an address such as http://127.0.0.1:8000"
    assert connection_error("ftp://a", aiohttp.NonHttpUrlClientError("ftp://a")) == expected


async def test_white_space_around_an_api_key_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\n")  # as from a file
    async with open_session(None) as session:
        assert session.headers["authorization"] == "Bearer sk-1"
    with pytest.raises(ServerError, match="control character"):
        open_session("sk-1\nsk-2")


async def test_a_self_signed_certificate_is_explained_and_can_be_trusted(
    tmp_path: Path,
) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    app = web.Application()

    async def models(http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with open_session(None) as session:
            with pytest.raises(ServerError) as failed:
                await first_model(session, url)
        assert str(failed.value).startswith(f"cannot verify the certificate of {url} (")
        assert "self-signed" in str(failed.value)
        assert "set SSL_CERT_FILE to the PEM file" in str(failed.value)
        process = await asyncio.create_subprocess_exec(  # aiohttp reads the variable when imported
            *(sys.executable, "-m", "gateway", "chat", url),
            env={**os.environ, "SSL_CERT_FILE": str(certificate)},
            stdin=subprocess.DEVNULL,
        )
        assert await process.wait() == 0
    finally:
        await runner.cleanup()
