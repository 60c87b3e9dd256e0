"""One conversation with its expected last message, and the ways to judge another answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Message = dict[str, Any]  # OpenAI's wire form
Tool = dict[str, Any]
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A conversation that ends with an assistant message; `judge` scores another answer."""

    domain: str
    messages: list[Message]
    judge: Judge
    tools: list[Tool] = field(default_factory=list)

    @property
    def answer(self) -> str:
        return str(self.messages[-1]["content"])

    @property
    def question(self) -> str:
        return str(self.messages[-2]["content"])


Skill = Callable[[Random, bool], Example]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def exactly(*accepted: str) -> Judge:
    return lambda text: text.strip() in accepted


def containing(*parts: str, least: int = 0) -> Judge:
    """All parts occur, and the text has a minimum length in characters."""
    return lambda text: len(text) >= least and all(part in text for part in parts)


def same_json(expected: object) -> Judge:
    def judge(text: str) -> bool:
        try:
            return bool(json.loads(text) == expected)
        except ValueError:
            return False

    return judge


def turn(domain: str, question: str, answer: str, judge: Judge | None = None) -> Example:
    """The usual shape: one question, one answer."""
    return Example(domain, [user(question), assistant(answer)], judge or exactly(answer))
