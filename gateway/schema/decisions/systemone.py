"""`POST /v1/systemone`: the request and response of TypeSafe's System One API."""

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from gateway.schema.decisions.openai import check_count
from gateway.schema.decisions.question import (
    CHOICES,
    LEVELS,
    Answer,
    Kind,
    Option,
    Question,
    check_options,
    check_text,
    json_text,
)
from gateway.schema.decoding import UnknownFields, check_allowed, decode, invalid
from gateway.schema.fields.sampling import SchedulingRequest
from gateway.schema.rendering import Usage

NOUL = "noul"  # a predicate
KINDS = {NOUL: Kind.PREDICATE, "choice": Kind.CHOICE, "score": Kind.SCORE}


class SystemOneQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A question of any type; `criteria` are its options."""

    type: str
    instructions: str | dict[str, Any] | list[Any] | None = None
    criteria: dict[str, Any] | list[Any] | None = None

    def read(self, name: str) -> Question:
        """The question. Raises `InvalidRequest` for the first invalid field."""
        path = f"questions.{name[:100]}"
        check_allowed(self.type, f"{path}.type", tuple(KINDS))
        kind = KINDS[self.type]
        options = self._options(kind, f"{path}.criteria")
        given = "" if self.instructions is None else self.instructions
        instructions = _text(given, f"{path}.instructions")
        if kind is Kind.PREDICATE and any(each.description for each in options):
            instructions = instructions.strip() or "Decide by the descriptions below."
        elif kind is not Kind.PREDICATE:
            instructions = instructions.strip() or "Which option describes the input best?"
        return Question(kind, check_text(instructions, f"{path}.instructions"), options, path, name)

    def _options(self, kind: Kind, path: str) -> tuple[Option, ...]:
        criteria = self.criteria
        if kind is Kind.SCORE:
            if not isinstance(criteria, list):
                raise invalid(path, "expected an array of levels.")
            texts = [_text(each, f"{path}[{i}]") for i, each in enumerate(criteria)]
            check_options(texts, path, LEVELS)
            return tuple(Option(place, text) for place, text in enumerate(texts))
        if criteria is None and kind is Kind.PREDICATE:
            criteria = {}
        if not isinstance(criteria, dict):
            raise invalid(path, "expected an object.")
        texts_of = {
            name: "" if each is None else _text(each, f"{path}.{name}")
            for name, each in criteria.items()
        }
        if kind is Kind.PREDICATE:
            for name in texts_of:
                check_allowed(name, path, ("true", "false"))
            yes, no = texts_of.get("true", ""), texts_of.get("false", "")
            return (Option(True, "", yes), Option(False, "", no))
        check_options([*texts_of], path, CHOICES)
        return tuple(Option(name, name, text) for name, text in texts_of.items())


class SystemOneRequest(SchedulingRequest, kw_only=True, forbid_unknown_fields=True):
    """A state and named questions about it."""

    model: str
    state: str | dict[str, Any] | list[Any]
    questions: dict[str, SystemOneQuestion]
    user: str | None = None

    def read_questions(self) -> list[Question]:
        """The questions in order. Raises `InvalidRequest`."""
        check_count(len(self.questions))
        return [each.read(name) for name, each in self.questions.items()]

    def read_input(self) -> str:
        """The state as text. Raises `InvalidRequest`."""
        return check_text(_text(self.state, "state"), "state")


def _text(value: object, path: str) -> str:
    return value if isinstance(value, str) else json_text(value, path)


def decode_systemone(body: bytes, unknown: UnknownFields | None = None) -> SystemOneRequest:
    """Decode the request and check its scheduling fields. Raises `InvalidRequest`."""
    request = decode(SystemOneRequest, body, unknown)
    request.check_scheduling()
    return request


def render_systemone(
    model: str,
    questions: Sequence[Question],
    answers: Sequence[Answer | None],
    usage: Usage,
) -> bytes:
    """The response body; a question that could not be answered is left out."""
    rows = {
        question.name: _answer(question, answer)
        for question, answer in zip(questions, answers, strict=True)
        if answer is not None
    }
    tokens = {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": 0,
        "cached_tokens": usage.cached_tokens,
    }
    return orjson.dumps({"model": model, "answers": rows, "usage": tokens})


def _answer(question: Question, answer: Answer) -> dict[str, Any]:
    mass = {"x_label_mass": answer.label_mass}
    if question.kind is Kind.PREDICATE:
        return {"type": NOUL, "noul": answer.probabilities[0], **mass}
    names = [str(option.value) for option in question.options]
    common = {
        "type": question.kind,
        "confidence": answer.confidence,
        "probabilities": dict(zip(names, answer.probabilities, strict=True)),
        **mass,
    }
    if question.kind is Kind.CHOICE:
        return common | {"choice": names[answer.best]}
    legend = dict(zip(names, [option.name for option in question.options], strict=True))
    return common | {"score": answer.level, "legend": legend}
