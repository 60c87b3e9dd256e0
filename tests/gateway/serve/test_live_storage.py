"""The official client on files, batches and responses, over a real port."""

import io
import json
import time
from collections.abc import Iterator

import openai
import pytest
from openai.types import Batch

from adapters.dialects.choosing import choose_dialect
from tests.gateway.forms import ENDED, chat_lines
from tests.gateway.rig import MODEL, Setting
from tests.gateway.serve.live import Live, listening

TEXT = "Grüße aus dem Süden 🙂 "
CALL = 'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
STEP = 0.001


@pytest.fixture
def live() -> Iterator[Live]:
    with listening(Setting(texts=(TEXT,), step=STEP)) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client


def test_the_official_client_keeps_files(client: openai.OpenAI) -> None:
    content = b"x" * (3 << 20)
    file = client.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
    assert (file.bytes, file.purpose, file.filename) == (len(content), "batch", "in.jsonl")
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).read() == content
    others = [client.files.create(file=b"x", purpose="batch") for _ in range(3)]
    assert {each.id for each in client.files.list(limit=2)} == {f.id for f in [file, *others]}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    expiring = client.files.create(
        file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert expiring.expires_at == expiring.created_at + 3600


def test_the_official_client_runs_a_batch(client: openai.OpenAI) -> None:
    file = client.files.create(file=chat_lines(5), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"for": "me"},
    )
    batch = until_ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 5
    assert batch.output_file_id is not None
    lines = client.files.content(batch.output_file_id).text.splitlines()
    bodies = [json.loads(line)["response"]["body"] for line in lines]
    assert [body["choices"][0]["message"]["content"] for body in bodies] == [TEXT] * 5
    assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
    assert client.batches.cancel(batch.id).status == "completed"


def until_ended(client: openai.OpenAI, batch: Batch) -> Batch:
    until = time.monotonic() + 30
    while batch.status not in ENDED:
        assert time.monotonic() < until, batch
        batch = client.batches.retrieve(batch.id)
    return batch


def test_the_official_client_gets_a_response_and_goes_on_from_it(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hi", instructions="Be kind.")
    assert first.output_text == TEXT
    assert first.usage is not None
    second = client.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(second.id).output_text == TEXT
    items = [item.to_dict() for item in client.responses.input_items.list(second.id, order="asc")]
    assert [item["role"] for item in items] == ["user", "assistant", "user"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
    assert bad.value.param == "previous_response_id"


def test_the_official_streaming_helper_gathers_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert "".join(deltas) == response.output_text == TEXT


def test_the_official_streaming_helper_gathers_thoughts_and_calls() -> None:
    text = "<think>Hm.</think>" + CALL
    hermes = choose_dialect("", "hermes", "think")
    with (
        listening(Setting(texts=(text,), step=STEP, dialect=hermes)) as live,
        openai.OpenAI(base_url=live.url, api_key="any", max_retries=0) as client,
        client.responses.stream(
            model=MODEL,
            input="hi",
            tools=[{"type": "function", "name": "add", "parameters": None, "strict": False}],
        ) as stream,
    ):
        for _ in stream:
            pass
        response = stream.get_final_response()
    thought, message, call = response.output
    assert thought.type == "reasoning"
    assert message.type == "message"
    assert response.output_text == "Let me see."
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"a": 1}
