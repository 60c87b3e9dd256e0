"""WebSocket responses on a real port: the official client, TLS and the end of the server."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from gateway.serve.tls import Certificate
from tests.certificates import make_certificate
from tests.gateway.rig import MODEL, Setting
from tests.gateway.serve.live import Live, listening

TEXT = "Grüße aus dem Süden 🙂 "
# The official client opens its connections without a context.
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")
BETA = {"OpenAI-Beta": "responses_websockets=2026-02-06"}


@pytest.fixture
def live() -> Iterator[Live]:
    with listening(Setting(texts=(TEXT,), step=0.002, keys=("k",))) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url, api_key="k", max_retries=0) as client:
        yield client


def text_of(connection: Any) -> tuple[str, str]:
    """The text of the next response's deltas, and its id."""
    text = ""
    for event in connection:
        if event.type == "response.output_text.delta":
            text += event.delta
        if event.type == "response.completed":
            return text, event.response.id
        assert event.type != "error", event
    raise AssertionError("the connection ended")


def test_the_official_client_continues_a_response(live: Live, client: openai.OpenAI) -> None:
    with client.responses.connect(extra_headers=BETA) as connection:
        warm: Any = {"model": MODEL, "generate": False, "store": False}
        connection.response.create(**warm, input="hi")
        text, response_id = text_of(connection)
        assert text == ""
        for _ in range(2):
            connection.response.create(
                model=MODEL, input="more", previous_response_id=response_id, store=False
            )
            text, response_id = text_of(connection)
            assert text == TEXT
    prompts = [bytes(request.spec.prompt).decode() for request in live.rig.ended]
    second = "user:hi\nuser:more\n"
    assert prompts == ["user:hi\n", second, f"{second}assistant:{TEXT}\nuser:more\n"]


def test_the_official_client_steers_a_response() -> None:
    with (
        listening(Setting(texts=(TEXT * 4,), step=0.02)) as live,
        openai.OpenAI(base_url=live.url, api_key="any", max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        connection.response.create(model=MODEL, input="hi", store=False)
        kinds = []
        for event in connection:
            kinds.append(event.type)
            if event.type == "response.output_text.delta" and kinds.count(event.type) == 2:
                running = next(iter(live.rig.service.running._by_id))
                connection.response.steer(input="stop", previous_response_id=running)
            if event.type == "response.incomplete":
                assert event.response.incomplete_details is not None
                assert event.response.incomplete_details.reason == "steered"
            if kinds.count("response.created") == 2:
                break
        assert "response.steer.accepted" in kinds


def test_a_wrong_key_is_a_401_of_the_handshake(live: Live) -> None:
    with (
        pytest.raises(InvalidStatus) as caught,
        connect(f"ws://127.0.0.1:{live.port}/v1/responses"),
    ):
        pass
    assert caught.value.response.status_code == 401


def test_it_works_over_tls(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "one")
    trust = ssl.create_default_context(cafile=files[0])
    with (
        listening(Setting(step=0.001), tls=Certificate(*files).context) as live,
        connect(f"wss://127.0.0.1:{live.port}/v1/responses", ssl=trust) as client,
    ):
        client.send('{"type":"response.create","model":"%s","input":"hi"}' % MODEL)  # noqa: UP031
        events = [client.recv() for _ in range(2)]
        assert '"response.created"' in str(events[0])


def test_a_running_response_ends_before_the_server_does() -> None:
    with (
        listening(Setting(texts=(TEXT,), step=0.01)) as live,
        connect(f"ws://127.0.0.1:{live.port}/v1/responses") as client,
    ):
        client.send('{"type":"response.create","model":"%s","input":"hi"}' % MODEL)  # noqa: UP031
        assert "response.created" in str(client.recv())
        live.stop()
        messages = []
        for message in client:  # ends with the close code 1000 or 1001
            messages.append(str(message))
        assert '"response.completed"' in messages[-1]
        assert client.close_code == 1001
