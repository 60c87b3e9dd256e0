import asyncio
import threading
from typing import Any

import pytest

from engine.request import Request
from engine.step import GrammarKind
from gateway.generation.choice_stream import MANY_TOKENS, ChoiceStream
from tests.gateway.answers import answer_to
from tests.gateway.rig import TEXT, Rig, Setting, play, played, text


def test_a_whole_response_has_openais_shape() -> None:
    reply = answer_to(TEXT, text()).json
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["choices"] == [
        {"index": 0, "text": "Hello!", "logprobs": None, "finish_reason": "stop"}
    ]
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_max_tokens_defaults_to_sixteen() -> None:
    (choice,) = answer_to(TEXT, text(), Setting(texts=("x" * 50,))).json["choices"]
    assert choice["text"] == "x" * 16
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, ids: list[tuple[int, ...]]) -> None:
    answer = answer_to(TEXT, text(prompt=prompt))
    reply = answer.json
    assert [request.spec.prompt for request in answer.rig.ended] == ids
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(ids)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize(("length", "is_in_thread"), [(9, False), (MANY_TOKENS + 1, True)])
@pytest.mark.parametrize("stream", [True, False])
def test_a_long_prompt_is_echoed_in_a_thread(
    length: int, is_in_thread: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are reported one by one, which takes milliseconds of the event loop's time."""
    threads: list[threading.Thread] = []
    echo = ChoiceStream._echo

    def noted(self: ChoiceStream, *arguments: Any) -> None:
        threads.append(threading.current_thread())
        echo(self, *arguments)

    monkeypatch.setattr(ChoiceStream, "_echo", noted)

    async def scene(rig: Rig) -> None:
        body = text(prompt=[97] * length, echo=True, logprobs=1, stream=stream, max_tokens=1)
        exchange = await rig.client.post(TEXT, body)
        assert exchange.status == 200
        assert exchange.content.count(b'"a"') >= length

    play(scene, Setting(context=4_000, step=0.001), asyncio.run)
    assert [thread is not threading.main_thread() for thread in threads] == [is_in_thread]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("response_format", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, (GrammarKind.JSON_OBJECT, "")),
        (SCHEMA, (GrammarKind.JSON_SCHEMA, '{"type":"object"}')),
    ],
)
@played()
async def test_a_response_format_constrains_the_output_as_in_a_chat(
    rig: Rig, response_format: dict[str, Any], grammar: tuple[GrammarKind, str] | None
) -> None:
    exchange = await rig.client.post(TEXT, text(response_format=response_format))
    assert exchange.status == 200
    assert rig.ended[0].spec.grammar == grammar


@played(Setting(texts=("one", "two", "three", "four")))
async def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(rig: Rig) -> None:
    body = text(prompt=["ab", "c"], n=2, best_of=2, seed=3, stream=True)
    *chunks, _ = (await rig.client.post(TEXT, body)).events
    said = ["", "", "", ""]
    for chunk in chunks:
        said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert said == ["one", "two", "three", "four"]
    seeds = [request.spec.sampling.seed for request in sorted_by_id(rig)]
    assert seeds[:2] == seeds[2:]
    assert seeds[0] == 3 != seeds[1]


def sorted_by_id(rig: Rig) -> list[Request]:
    return sorted(rig.ended, key=lambda request: request.request_id)


@played(Setting(context=500))
async def test_far_too_many_token_ids_are_rejected_before_they_are_decoded(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = [104] * 600
    with monkeypatch.context() as patch:
        patch.delattr("gateway.web.routes.completions.decode_checked")
        exchange = await rig.client.post(TEXT, text(prompt=prompt, max_tokens=5))
        error = exchange.json["error"]
    assert (exchange.status, error["code"]) == (400, "context_length_exceeded")
    assert "600" in error["message"]
    assert "5" in error["message"]
    for allowed in ({"prompt": prompt, "truncate_prompt_tokens": 9}, {"prompt": [prompt[:9]]}):
        exchange = await rig.client.post(TEXT, text(**allowed, max_tokens=5))
        assert exchange.json["object"] == "text_completion"


@pytest.mark.parametrize(
    ("prompt", "named"),
    [(b"[" + b"1," * 600, "JSON"), (b"[" * 600 + b",1" * 600, "prompt[0]"), (b'["' * 600, "JSON")],
)
def test_a_long_body_that_is_not_valid_is_rejected_as_a_short_one(
    prompt: bytes, named: str
) -> None:
    answer = answer_to(TEXT, b'{"prompt":' + prompt + b"," * 600, Setting(context=500))
    message = answer.json["error"]["message"]
    assert answer.status == 400
    assert named in message
