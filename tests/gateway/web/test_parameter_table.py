import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from anthropic.types import message_create_params as message_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params

from gateway.schema.openai.chat import ChatRequest
from gateway.schema.openai.completions import CompletionRequest
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, TEXT, Rig, Setting, chat, played, text
from tests.gateway.web.parameters import page

PAGE = (Path(__file__).parents[3] / "gateway" / "README.md").read_text(encoding="utf-8")
_ROW = re.compile(
    r"^\| ((?:`\w+` ?)+)\| (both|chat|text) \| (supported|ignored|rejected) \|", re.MULTILINE
)

# A value of the right type that would have an effect.
IGNORED: dict[str, Any] = {
    "spaces_between_special_tokens": False,
    "guided_decoding_backend": "xgrammar",
    "user": "u",
    "safety_identifier": "s",
    "metadata": {"a": "b"},
    "store": True,
    "verbosity": "high",
}
REJECTED: dict[str, Any] = {
    "guided_whitespace_pattern": " ",
    "modalities": ["audio"],
    "audio": {"voice": "alloy", "format": "wav"},
    "web_search_options": {},
    "moderation": {"model": "m"},
}


class Row(NamedTuple):
    """One field of the table."""

    name: str
    where: str
    how: str


ROWS = [
    Row(name, where, how)
    for names, where, how in _ROW.findall(PAGE)
    for name in re.findall(r"`(\w+)`", names)
]


def fields(where: str) -> set[str]:
    return {row.name for row in ROWS if row.where in (where, "both")}


def test_the_table_lists_exactly_the_request_fields() -> None:
    assert len(ROWS) == len({row.name for row in ROWS})
    assert fields("chat") == set(ChatRequest.__struct_fields__)
    assert fields("text") == set(CompletionRequest.__struct_fields__)
    assert {row.name for row in ROWS if row.how == "ignored"} == IGNORED.keys()
    assert {row.name for row in ROWS if row.how == "rejected"} == REJECTED.keys()


def ways(row: Row) -> list[tuple[str, dict[str, Any]]]:
    """The endpoints that know a field, and a body for each."""
    known = [("chat", CHAT, chat()), ("text", TEXT, text())]
    return [(path, body) for where, path, body in known if row.where in (where, "both")]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.how != "supported"], ids=lambda r: r.name
)
@played()
async def test_ignored_fields_change_nothing_and_rejected_fields_are_named(
    rig: Rig, row: Row
) -> None:
    for path, body in ways(row):
        value = IGNORED.get(row.name, REJECTED.get(row.name))
        exchange = await rig.client.post(path, {**body, row.name: value})
        if row.how == "ignored":
            assert exchange.status == 200
            assert rig.ended[-1].spec.grammar is None
        else:
            assert (exchange.status, exchange.json["error"]["param"]) == (400, row.name)


@pytest.mark.parametrize("name", sorted(fields("chat") ^ fields("text")))
def test_a_field_of_one_endpoint_is_unknown_to_the_other(name: str) -> None:
    path, body = (TEXT, text()) if name in fields("chat") else (CHAT, chat())
    answer = answer_to(path, {**body, name: None}, Setting(rejects_unknown_fields=True))
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, name)


PARAMETERS = (Path(__file__).parents[3] / "gateway" / "PARAMETERS.md").read_text(encoding="utf-8")
CLIENTS: list[tuple[str, Any]] = [
    ("Chat completions", chat_params.CompletionCreateParamsBase),
    ("Completions", text_params.CompletionCreateParamsBase),
    ("Responses", response_params.ResponseCreateParamsBase),
    ("Messages", message_params.MessageCreateParamsBase),
]
REQUIRED = {"model", "messages", "input", "max_tokens"}


def test_the_page_of_parameters_says_what_becomes_of_each() -> None:
    assert page() == PARAMETERS, (
        "run: python -m tests.gateway.web.parameters > gateway/PARAMETERS.md"
    )


@pytest.mark.parametrize(("title", "shape"), CLIENTS)
def test_the_page_lists_the_parameters_of_the_newest_clients(title: str, shape: Any) -> None:
    rows = PARAMETERS.partition(f"## {title}\n")[2].partition("##")[0]
    listed = set(re.findall(r"`(\w+)`", rows))
    required = REQUIRED | ({"prompt"} if title == "Completions" else set())
    assert set(shape.__annotations__) - required <= listed
