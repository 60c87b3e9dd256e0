"""Prompt cache options: breakpoints of all three APIs, what is left to others, and prewarming.

In the rig a token is a byte, a block has one token, and a message is rendered as `role:content\\n`.
"""

from typing import Any

import pytest

from gateway.generation.prompt import marks_of
from gateway.schema.openai.chat import ContentPart, Message
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, MODEL, TEXT, USER, Rig, Setting, chat, played, text
from tests.gateway.scripted_model import ByteTokenizer

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
MARK: dict[str, Any] = {"prompt_cache_breakpoint": {"mode": "explicit"}}
CONTROL = {"cache_control": {"type": "ephemeral"}}
EXPLICIT = {"mode": "explicit"}
PARTS = [
    {"role": "system", "content": [{"type": "text", "text": "Bé", **MARK}]},
    {"role": "user", "content": [{"type": "text", "text": "ab", **MARK},
                                 {"type": "text", "text": "cd"}]},
]  # fmt: skip
ENDS = (len("system:Bé".encode()), len("system:Bé\nuser:ab".encode()))


def sent(path: str, body: dict[str, Any], setting: Setting | None = None) -> tuple[int, Any, Rig]:
    """Status, JSON and rig of one request."""
    found = answer_to(path, body, setting)
    return found.status, found.json, found.rig


def test_messages_are_found_in_what_a_template_made_of_them() -> None:
    messages = [
        Message("system", " Bé "),
        Message("user", [ContentPart("text", "  x\n"), ContentPart("text", "yz ", **MARK)]),
        Message("assistant", "not in the prompt"),
        Message("user", "x"),
    ]
    prompt = "<s>Bé</s><u>x\nyz</u><u>x</u>"
    marks = marks_of(messages, prompt, tuple(prompt.encode()), ByteTokenizer())
    ends = [len(prompt[: prompt.index(at) + len(at)].encode()) for at in ("Bé", "yz", "yz")]
    assert marks.message_ends == [*ends, len(prompt.encode()) - len("</u>")]
    assert marks.breakpoints == [ends[1]]


def test_only_the_latest_four_breakpoints_are_kept() -> None:
    messages = [Message("user", [ContentPart("text", str(n), **MARK)]) for n in range(6)]
    prompt = "012345"
    marks = marks_of(messages, prompt, tuple(prompt.encode()), ByteTokenizer())
    assert marks.breakpoints == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(messages=PARTS)),
        (
            RESPONSES,
            {
                "model": MODEL,
                "input": [
                    {"role": "system", "content": [{"type": "input_text", "text": "Bé", **MARK}]},
                    {"role": "user", "content": [{"type": "input_text", "text": "ab", **MARK},
                                                 {"type": "input_text", "text": "cd"}]},
                ],
            },
        ),
        (
            MESSAGES,
            {
                "model": MODEL,
                "max_tokens": 20,
                "system": [{"type": "text", "text": "Bé", **CONTROL}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "ab", **CONTROL},
                                                          {"type": "text", "text": "cd"}]}],
            },
        ),
    ],
    ids=["chat", "responses", "messages"],
)  # fmt: skip
def test_breakpoints_of_all_apis_are_checkpoints_of_the_prompt(
    path: str, body: dict[str, Any]
) -> None:
    status, _, rig = sent(path, body)
    assert status == 200
    (request,) = rig.ended
    assert request.spec.caching.checkpoints == ENDS
    assert request.spec.caching.until is None


def test_a_truncated_prompt_has_the_breakpoints_that_are_left() -> None:
    _, _, rig = sent(CHAT, chat(messages=PARTS, truncate_prompt_tokens=12))
    (request,) = rig.ended
    num_cut = len("system:Bé\nuser:abcd\n".encode()) - 12
    assert request.spec.caching.checkpoints == tuple(end - num_cut for end in ENDS if end > num_cut)


@played()
async def test_explicit_caching_keeps_nothing_behind_the_last_breakpoint(rig: Rig) -> None:
    explicit = chat(messages=PARTS, prompt_cache_options=EXPLICIT)
    for known in (0, ENDS[-1]):
        details = (await rig.client.post(CHAT, explicit)).json["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": known, "cache_write_tokens": ENDS[-1] - known}
    unmarked = text(prompt="nothing is kept of this", prompt_cache_options=EXPLICIT)
    for _ in range(2):
        details = (await rig.client.post(TEXT, unmarked)).json["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_messages_count_what_is_written_only_with_cache_control() -> None:
    body = {"model": MODEL, "max_tokens": 20, "messages": USER}
    usage = sent(MESSAGES, body)[1]["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (8, 0)
    marked = [{"role": "user", "content": [{"type": "text", "text": "hi", **CONTROL}]}]
    usage = sent(MESSAGES, body | {"messages": marked})[1]["usage"]
    assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (0, 8)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@played()
async def test_prewarming_computes_the_prompt_in_the_background_and_no_output(
    rig: Rig, stream: bool
) -> None:
    warm = chat(prompt_cache_options={"prewarm": True}, stream=stream)
    exchange = await rig.client.post(CHAT, warm)
    body = exchange.content.decode()
    assert exchange.status == 200
    assert '"content":""' in body
    assert '"finish_reason":"stop"' in body
    (request,) = rig.ended
    assert (request.spec.is_background, request.produced) == (True, 0)
    reply = (await rig.client.post(CHAT, chat())).json
    assert reply["choices"][0]["message"]["content"] == "Hello!"
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 7


@pytest.mark.parametrize(
    ("path", "changed", "param"),
    [
        (CHAT, {"prompt_cache_options": {"mode": "auto"}}, "prompt_cache_options.mode"),
        (CHAT, {"prompt_cache_options": {"ttl": "5 minutes"}}, "prompt_cache_options.ttl"),
        (CHAT, {"prompt_cache_retention": "1y"}, "prompt_cache_retention"),
        (
            CHAT,
            {"prompt_cache_options": {"comparison_response_id": "resp_1"}},
            "prompt_cache_options.comparison_response_id",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [
                {"type": "text", "text": "x", "prompt_cache_breakpoint": True}]}]},
            "messages[0].content[0].prompt_cache_breakpoint",
        ),
    ],
)  # fmt: skip
def test_other_values_are_rejected(path: str, changed: dict[str, Any], param: str) -> None:
    status, body, _ = sent(path, chat(**changed))
    assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("path", "changed", "seconds"),
    [
        (CHAT, {}, 0.0),
        (CHAT, {"prompt_cache_retention": "in_memory"}, 0.0),
        (CHAT, {"prompt_cache_options": {"ttl": "30m"}}, 1800.0),
        (TEXT, {"prompt": "ab", "messages": None, "prompt_cache_options": {"ttl": "12h"}}, 43200.0),
        (CHAT, {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 86400.0),
        (RESPONSES, {"input": "a", "messages": None, "prompt_cache_retention": "24h"}, 86400.0),
        (RESPONSES, {"input": "a", "messages": None, "prompt_cache_options": {"ttl": "1h"}},
         3600.0),
        (MESSAGES, {"max_tokens": 1}, 0.0),
        (MESSAGES, {"max_tokens": 1, **CONTROL}, 300.0),
        (
            MESSAGES,
            {"max_tokens": 1, **CONTROL, "system": [
                {"type": "text", "text": "S",
                 "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
            3600.0,
        ),
    ],
)  # fmt: skip
def test_what_a_request_leaves_is_retained_for_its_ttl(
    path: str, changed: dict[str, Any], seconds: float
) -> None:
    body = {name: value for name, value in chat(**changed).items() if value is not None}
    status, reply, rig = sent(path, body)
    assert status == 200, reply
    (request,) = rig.ended
    assert request.spec.retention == seconds


def test_an_unknown_ttl_of_a_message_is_rejected_by_its_path() -> None:
    control = {"cache_control": {"type": "ephemeral", "ttl": "1y"}}
    content = [{"type": "text", "text": "a", **control}]
    messages = [{"role": "user", "content": content}]
    status, body, _ = sent(MESSAGES, {"model": MODEL, "max_tokens": 1, "messages": messages})
    assert status == 400
    assert "messages[0].content[0].cache_control.ttl" in body["error"]["message"]
