import json
import socket
import time
import urllib.parse
from typing import Any

import httpx


def test_a_client_that_does_not_read_is_named_as_the_cause(server_url: str) -> None:
    """A client with a small receive buffer, which does not read until the engine has finished."""
    messages = [{"role": "user", "content": "Once"}]
    body = {"model": "builtin", "messages": messages, "stream": True, "n": 8, "max_tokens": 700}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}  # 1.4 kB a token
    encoded = json.dumps(body).encode()
    address = urllib.parse.urlsplit(server_url)
    assert address.hostname is not None
    assert address.port is not None
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-request-id: slow\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(encoded)}\r\n"
        client.sendall(f"{head}connection: close\r\n\r\n".encode() + encoded)
        until = time.monotonic() + 60
        while not all(choice["ended"] for choice in _timeline(server_url)["choices"]):
            assert time.monotonic() < until
            time.sleep(0.2)
        while "Its client did not read for " not in (found := _timeline(server_url)["explanation"]):
            assert time.monotonic() < until, found
            _read_all(client)
    assert "the client or its network was slow, not the engine" in found


def _timeline(url: str) -> dict[str, Any]:
    """Of the request "slow"; it may not have arrived yet."""
    response = httpx.get(f"{url}/v1/requests/slow/timeline")
    found: dict[str, Any] = response.json()
    return found if response.status_code == 200 else {"choices": [{"ended": False}]}


def _read_all(client: socket.socket) -> None:
    """Everything that can be read without waiting for long."""
    client.settimeout(0.1)
    try:
        while client.recv(65536):
            pass
    except TimeoutError:
        return
