"""The requests of the load, and what of an answer must never change."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Json = dict[str, Any]

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTIONS = (
    "Tell me a story about a fox.",
    "What is Podway? Explain it in a few words.",
    "What is 12 + 30?",
    "Write a poem about rain.",
)


class Asked(NamedTuple):
    """A request with a seed or without randomness, whose answer is always the same."""

    kind: str
    path: str
    body: Json


def catalogue(loras: Sequence[str]) -> list[Asked]:
    """All requests of the load; `loras` are the names of adapters that are served."""
    asked: list[Asked] = []
    for number, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        for kind, more in (
            ("greedy", {"temperature": 0.0, "max_tokens": 120}),
            ("seeded", {"seed": 7 + number, "max_tokens": 80}),
            ("choices", {"seed": number, "n": 3, "max_tokens": 30}),
            ("penalties", {"seed": number, "frequency_penalty": 0.7, "max_tokens": 60}),
            ("json", {"seed": number, "max_tokens": 60, "response_format": _format()}),
            (
                "tool",
                {"seed": number, "max_tokens": 60, "tools": [TOOL], "tool_choice": "required"},
            ),
        ):
            asked.append(Asked(kind, CHAT, {"model": "builtin", "messages": messages, **more}))
        for name in loras:
            body = {"model": name, "messages": messages, "temperature": 0.0, "max_tokens": 40}
            asked.append(Asked("lora", CHAT, body))
        prompt = [100 + (number * 31 + place * 7) % 800 for place in range(300 + 100 * number)]
        body = {"model": "builtin", "prompt": prompt, "temperature": 0.0, "max_tokens": 24}
        asked.append(Asked("long prompt", TEXT, body))
    return asked


def _format() -> Json:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


def whole_text(path: str, answer: Json) -> str:
    """What of an answer must not change: texts, calls and finish reasons, by choice."""
    return json.dumps([_choice(path, choice) for choice in answer["choices"]])


def _choice(path: str, choice: Json) -> list[Any]:
    if path == TEXT:
        return [choice["text"], [], choice["finish_reason"]]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    functions = [[call["name"], call["arguments"]] for call in calls]
    return [message.get("content") or "", functions, choice["finish_reason"]]


class StreamedText:
    """The same of a stream, from its chunks."""

    def __init__(self, num_choices: int) -> None:
        self._texts = [""] * num_choices
        self._calls: list[list[list[str]]] = [[] for _ in range(num_choices)]
        self._reasons: list[str | None] = [None] * num_choices

    def add(self, chunk: Json) -> None:
        """A chunk in the order of the stream."""
        for choice in chunk["choices"]:
            index, delta = choice["index"], choice.get("delta", {})
            self._texts[index] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                function, calls = call["function"], self._calls[index]
                if call["index"] == len(calls):
                    calls.append(["", ""])
                calls[call["index"]][0] += function.get("name") or ""
                calls[call["index"]][1] += function.get("arguments") or ""
            self._reasons[index] = choice.get("finish_reason") or self._reasons[index]

    @property
    def is_whole(self) -> bool:
        """Whether every choice has ended."""
        return None not in self._reasons

    @property
    def text(self) -> str:
        """As `whole_text` has it."""
        rows = zip(self._texts, self._calls, self._reasons, strict=True)
        return json.dumps([list(row) for row in rows])
