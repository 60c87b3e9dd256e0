"""`POST /v1/decisions`: OpenAI's request and response."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from engine.errors import InvalidRequest
from gateway.schema.decisions.question import (
    CHOICES,
    LEVELS,
    MAX_QUESTIONS,
    Answer,
    Kind,
    Option,
    Question,
    check_options,
    check_text,
    json_text,
)
from gateway.schema.decoding import UnknownFields, check_allowed, decode, invalid, reject_unless
from gateway.schema.fields.sampling import PromptCacheOptions, SchedulingRequest
from gateway.schema.rendering import Usage
from gateway.schema.responses.items import ContentItem, InputItem, as_messages, stored_items

OPTIONS = "prompt_cache_options."
CALLS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    """An option of a choice."""

    value: str | bool
    description: str | None = None


class Level(msgspec.Struct, forbid_unknown_fields=True):
    """A level of a score, the lowest first."""

    label: str
    description: str | None = None


class QuestionItem(msgspec.Struct, forbid_unknown_fields=True):
    """A question of any type."""

    type: str
    instructions: str | list[ContentItem]
    name: str | None = None
    choices: list[Choice] | None = None
    levels: list[Level] | None = None

    def read(self, path: str) -> Question:
        """The question. Raises `InvalidRequest` for the first invalid field."""
        check_allowed(self.type, f"{path}.type", tuple(Kind))
        kind = Kind(self.type)
        wanted = {Kind.CHOICE: "choices", Kind.SCORE: "levels"}.get(kind)
        for name in ("choices", "levels"):
            if (getattr(self, name) is None) == (name == wanted):
                raise InvalidRequest(
                    f"Missing required parameter: '{path}.{name}'."
                    if name == wanted
                    else f"'{path}.{name}' is not allowed for a {kind}.",
                    f"{path}.{name}",
                )
        instructions = check_text(
            read_text(self.instructions, f"{path}.instructions"), f"{path}.instructions"
        )
        return Question(kind, instructions, self._options(path), path, self.name)

    def _options(self, path: str) -> tuple[Option, ...]:
        if self.choices is not None:
            check_options([each.value for each in self.choices], f"{path}.choices", CHOICES)
            return tuple(
                Option(each.value, _name(each.value), each.description or "")
                for each in self.choices
            )
        if self.levels is not None:
            check_options([each.label for each in self.levels], f"{path}.levels", LEVELS)
            return tuple(
                Option(place, each.label, each.description or "")
                for place, each in enumerate(self.levels)
            )
        return (Option(True, ""), Option(False, ""))


class DecisionRequest(SchedulingRequest, kw_only=True, forbid_unknown_fields=True):
    """All fields of OpenAI's request."""

    model: str
    input: str | list[InputItem]
    questions: list[QuestionItem]
    prompt_cache_key: str | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: str | None = None
    user: str | None = None

    def read_questions(self) -> list[Question]:
        """The questions in order. Raises `InvalidRequest`."""
        check_count(len(self.questions))
        return [each.read(f"questions[{i}]") for i, each in enumerate(self.questions)]

    def read_input(self) -> str | list[dict[str, Any]]:
        """The input as one text or as chat messages. Raises `InvalidRequest`."""
        if isinstance(self.input, str):
            return check_text(self.input, "input")
        for i, item in enumerate(self.input):
            item.content = _without_json(item.content, f"input[{i}].content")
            item.output = _without_json(item.output, f"input[{i}].output")
            if images := item.image_fields(f"input[{i}]"):
                message = f"'{images[0]}' is an image; decisions are about texts."
                raise InvalidRequest(message, images[0])
        items = stored_items(self.input, lambda prefix: prefix)
        _check_calls(items)
        return as_messages(items)


def check_count(num_questions: int) -> None:
    """Raise `InvalidRequest` for too few or too many questions."""
    if not 0 < num_questions <= MAX_QUESTIONS:
        raise invalid(
            "questions", f"expected 1 to {MAX_QUESTIONS} questions, but got {num_questions}."
        )


def read_text(content: str | list[ContentItem], path: str) -> str:
    """The text of a string or of parts. Raises `InvalidRequest` for a part that is not text."""
    if isinstance(content, str):
        return content
    parts = _without_json(content, path)
    assert isinstance(parts, list), "parts stay parts"
    return "\n".join([part.read(f"{path}[{i}]") for i, part in enumerate(parts)])


def _without_json(
    content: str | list[ContentItem] | None, path: str
) -> str | list[ContentItem] | None:
    """The content with text in place of its parts of JSON."""
    if not isinstance(content, list):
        return content
    parts = []
    for i, part in enumerate(content):
        if part.type == "input_json":
            if not isinstance(part.data, dict | list):
                raise invalid(f"{path}[{i}].data", "expected an object or an array.")
            text = json_text(part.data, f"{path}[{i}].data")
            part = ContentItem("input_text", text)
        parts.append(part)
    return parts


def _check_calls(items: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InvalidRequest` for an output without its call before it."""
    known: set[tuple[str, str]] = set()
    for i, item in enumerate(items):
        kind = item["type"]
        if kind in CALLS.values():
            known.add((kind, item["call_id"]))
        elif kind in CALLS and (CALLS[kind], item["call_id"]) not in known:
            path = f"input[{i}].call_id"
            raise invalid(path, f"no {CALLS[kind]} before it has this id.")


def _name(value: str | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else value


def decode_decision(body: bytes, unknown: UnknownFields | None = None) -> DecisionRequest:
    """Decode the request and check its scheduling fields. Raises `InvalidRequest`."""
    request = decode(DecisionRequest, body, unknown)
    request.check_scheduling()
    if request.prompt_cache_options is not None:
        request.prompt_cache_options.check()
        reject_unless(request.prompt_cache_options, "prewarm", False, prefix=OPTIONS)
    for name in ("prompt_cache_key", "prompt_cache_options"):
        if unknown is not None and getattr(request, name) is not None:
            unknown.ignore(name)
    return request


def render_decision(
    model: str,
    questions: Sequence[Question],
    answers: Sequence[Answer | None],
    usage: Usage,
) -> bytes:
    """The response body; a question without an answer has a refusal."""
    rows = [_answer(*row) for row in zip(questions, answers, strict=True)]
    return orjson.dumps({"answers": rows, "model": model, "usage": usage.as_response_json()})


def _answer(question: Question, answer: Answer | None) -> dict[str, Any]:
    if answer is None:
        return {"type": "refusal", "name": question.name}
    common: dict[str, Any] = {
        "type": question.kind,
        "name": question.name,
        "label_mass": answer.label_mass,
    }
    if question.kind is Kind.PREDICATE:
        return common | {"probability": answer.probabilities[0]}
    rows = [
        {"value": option.value, "probability": probability}
        for option, probability in zip(question.options, answer.probabilities, strict=True)
    ]
    common |= {"confidence": answer.confidence, "probabilities": rows}
    if question.kind is Kind.CHOICE:
        return common | {"choice": question.options[answer.best].value}
    for row, option in zip(rows, question.options, strict=True):
        row["label"] = option.name
    return common | {"score": answer.level}
