"""Skill: call the tool that fits, with arguments from the question; then say what it returned."""

import json
import re
from dataclasses import dataclass
from random import Random
from typing import Any

from examples.builtin_model.corpus.example import (
    Example,
    Judge,
    Message,
    Tool,
    assistant,
    exactly,
    user,
)
from examples.builtin_model.corpus.phrasing import question, request
from examples.builtin_model.corpus.tool_kinds import KINDS, Kind, Parameter, made_up_kind

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
Arguments = dict[str, Any]
Call = tuple[str, Arguments]
_QUESTION = ("what", "how", "is ", "will", "do ", "which", "who", "can", "could")


@dataclass(frozen=True, slots=True, eq=False)
class Offer:
    """One tool as it is offered: a kind with its names chosen."""

    kind: Kind
    name: str
    parameters: tuple[tuple[str, Parameter], ...]
    about: str


def offer(random: Random, kind: Kind) -> Offer:
    chosen = tuple((random.choice(each.names), each) for each in kind.parameters)
    return Offer(kind, random.choice(kind.names), chosen, random.choice(kind.about))


def schema(random: Random, offered: Offer) -> Tool:
    """OpenAI's format, brief or verbose."""
    wordy = random.random() < 0.4
    properties: dict[str, Any] = {}
    for name, parameter in offered.parameters:
        properties[name] = {"type": parameter.type}
        if wordy:
            properties[name]["description"] = random.choice(parameter.about)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if properties and random.random() < 0.8:
        parameters["required"] = list(properties)
    if random.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": offered.name}
    if random.random() < 0.85:
        function["description"] = offered.about
    function["parameters"] = parameters
    if random.random() < 0.1:
        function["strict"] = True
    return {"type": "function", "function": function}


def offers(random: Random, held: bool, count: int) -> list[Offer]:
    kinds: list[Kind] = []
    for _ in range(count):
        known = random.choice([kind for kind in KINDS.values() if kind not in kinds])
        kinds.append(made_up_kind(random, held) if random.random() < 0.4 else known)
    return [offer(random, kind) for kind in kinds]


def _call(random: Random, held: bool, offered: Offer) -> tuple[str, Arguments]:
    """A question for this tool, and the arguments it asks for."""
    values = [parameter.make(random, held) for _, parameter in offered.parameters]
    text = offered.kind.asks.pick(random, held).format(*values)
    asked = question if text.startswith(_QUESTION) else request
    names = [name for name, _ in offered.parameters]
    return asked(random, text), dict(zip(names, values, strict=True))


def _message(calls: list[Call]) -> Message:
    wire = []
    for i, (name, given) in enumerate(calls):
        function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
        wire.append({"id": f"call_{i}", "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": wire}


def calls_in(text: str) -> list[tuple[str, Any]] | None:
    """Every call in a reply; None where one is not JSON."""
    try:
        found = [json.loads(body) for body in _CALL.findall(text)]
        return [(call["name"], call["arguments"]) for call in found]
    except (ValueError, KeyError, TypeError):
        return None


def _judge(expected: list[Call]) -> Judge:
    return lambda text: calls_in(text) == expected


_BARE = ("result", "value", "time", "text")


def _words(result: Any) -> str:
    """A result in words: a single value as it is, a record as names and values."""
    if not isinstance(result, dict):
        return str(result).rstrip(".")
    values = {
        key: json.dumps(value) if isinstance(value, bool) else str(value)
        for key, value in result.items()
    }
    if len(values) == 1 and next(iter(values)) in _BARE:
        return next(iter(values.values()))
    return ", ".join(f"{key} {value}" for key, value in values.items())


def told(kind: Kind, given: Arguments, result: Any) -> str:
    """The model's report of a result, which uses only the result's words."""
    words = _words(result)
    if isinstance(result, dict) and "error" in result:
        return f"The tool reports an error: {result['error']}."
    if kind is KINDS["weather"]:
        return f"The weather in {next(iter(given.values()))}: {words}."
    if kind is KINDS["time"]:
        return f"The time in {next(iter(given.values()))}: {words}."
    return f"The answer is: {words}."


def _ask(random: Random, held: bool, chosen: Offer) -> tuple[Message, list[Call]]:
    """A question and its calls: sometimes one question with two calls."""
    asked, given = _call(random, held, chosen)
    calls = [(chosen.name, given)]
    if chosen.kind in (KINDS["weather"], KINDS["time"]) and random.random() < 0.2:
        name, parameter = chosen.parameters[0]
        other = parameter.make(random, held)
        if other != given[name]:
            asked = asked.replace(given[name], f"{given[name]} and {other}")
            calls.append((chosen.name, {name: other}))
    return user(asked), calls


def _answered(random: Random, chosen: Offer, calls: list[Call]) -> list[Message]:
    """The results of the calls, and the model's report."""
    messages: list[Message] = []
    answers = []
    for i, (_, given) in enumerate(calls):
        result = chosen.kind.returns(random)
        if random.random() < 0.08:
            result = {"error": random.choice(("not found", "timeout", "no access"))}
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        messages.append({"role": "tool", "tool_call_id": f"call_{i}", "content": text})
        answers.append(told(chosen.kind, given, result))
    return [*messages, assistant(" ".join(answers))]


def _conversation(random: Random, held: bool, reported: bool) -> Example:
    """One to three questions over the same tools; the last ends with its call or its report."""
    offered = offers(random, held, random.choice((1, 1, 1, 2, 2, 3)))
    tools = [schema(random, each) for each in offered]
    messages: list[Message] = []
    for _ in range(random.choice((0, 0, 1)) if held else random.choice((0, 1, 1, 2))):
        chosen = random.choice(offered)
        said, calls = _ask(random, False, chosen)
        messages += [said, _message(calls), *_answered(random, chosen, calls)]
    chosen = random.choice(offered)
    said, calls = _ask(random, held, chosen)
    messages += [said, _message(calls)]
    if not reported:
        return Example("tools: call", messages, _judge(calls), tools)
    messages += _answered(random, chosen, calls)
    return Example("tools: result", messages, exactly(str(messages[-1]["content"])), tools)


def calling(random: Random, held: bool) -> Example:
    return _conversation(random, held, False)


def reporting(random: Random, held: bool) -> Example:
    return _conversation(random, held, True)
