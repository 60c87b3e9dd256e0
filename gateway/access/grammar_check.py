"""Grammars are checked before their request is accepted: size limits, then compilation.

An invalid grammar is an `InvalidRequest` that names the field. Results are cached, so a schema
that is sent with every request is compiled once here. (The worker compiles it again for itself.)
Compilation is limited in time and memory by the `GrammarChecker`. A grammar is first tried for
`TRY_SECONDS`, one at a time, so that those that compile quickly, as nearly all do, never wait for
those that do not; these are compiled in one of `SEATS` seats then. A tenant tries and compiles one
grammar at a time, and waiting is limited, too.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from engine.step import Grammar, GrammarKind
from gateway.access.seats import Seats
from gateway.ports import GrammarChecker
from gateway.schema.decoding import invalid

SEATS = 2
FULL = "Too many grammars are being compiled. Please try again later."
TRY_SECONDS = 0.3
MAX_BYTES = 128 << 10
CHARS_ON_LOOP = 32 << 10  # a grammar up to this length is checked on the loop, in 2 ms
JSON_KINDS = frozenset({GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE, GrammarKind.TAGS})
MAX_OPTIONAL = 700  # properties in succession of which any may be the next one
# With these keywords a schema is merged with another one, or properties do not matter.
NOT_COUNTED = frozenset({"allOf", "anyOf", "oneOf", "$ref", "const", "enum"})
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Limits on the grammar of one request, on waiting for a seat, and on cached results."""

    max_bytes: int = MAX_BYTES
    max_depth: int = 64
    wait_seconds: float = 6.0  # one compilation may take 5 s
    max_remembered: int = 256


class GrammarCheck:
    """Checks whether outputs can be constrained to a grammar."""

    def __init__(self, checker: GrammarChecker, limits: GrammarLimits | None = None) -> None:
        self._checker = checker
        self._limits = limits or GrammarLimits()
        self._trying = Seats(1, self._limits.wait_seconds, FULL)
        self._seats = Seats(SEATS, self._limits.wait_seconds, FULL)
        self._results: OrderedDict[Grammar, asyncio.Task[str | None]] = OrderedDict()

    async def check_grammar(self, grammar: Grammar, param: str, tenant: str = "") -> None:
        """Return if outputs can be constrained to `grammar`.

        Raises `InvalidRequest` if they cannot, and `Overloaded` if there is no seat to compile it
        within `wait_seconds`. `param` is the request field that the error names, for example
        `response_format.json_schema.schema`.
        """
        if len(grammar.text) <= CHARS_ON_LOOP:
            reason = _limit_error(grammar, self._limits)
        else:
            reason = await asyncio.to_thread(_limit_error, grammar, self._limits)
        if reason is None:
            reason = await asyncio.shield(self._result(grammar, tenant))
        if reason is not None:
            raise invalid(param, f"{reason}.")

    def _result(self, grammar: Grammar, tenant: str) -> asyncio.Task[str | None]:
        """One task for all requests with this grammar; its result is the error, or None."""
        task = self._results.pop(grammar, None)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            work = self._compile(grammar, tenant)
            task = asyncio.get_running_loop().create_task(work, name="grammar")
        self._results[grammar] = task
        if len(self._results) > self._limits.max_remembered:
            self._results.popitem(last=False)
        return task

    async def _compile(self, grammar: Grammar, tenant: str) -> str | None:
        """Try it briefly, and then, if it takes longer, compile it in one of the seats."""
        try:
            async with self._trying.taken(tenant):
                return await self._checker.check(grammar, TRY_SECONDS)
        except TimeoutError:
            async with self._seats.taken(tenant):
                return await self._checker.check(grammar)


def _limit_error(grammar: Grammar, limits: GrammarLimits) -> str | None:
    """The first limit that the grammar exceeds, found without compiling it; or None."""
    try:
        num_bytes = len(grammar.text.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if num_bytes > limits.max_bytes:
        return f"it has {num_bytes} bytes; at most {limits.max_bytes} are allowed"
    if (depth := _depth(grammar.text)) > limits.max_depth:
        return f"it is nested {depth} deep; at most {limits.max_depth} is allowed"
    if grammar.kind in JSON_KINDS:
        try:
            found = json.loads(grammar.text)
        except ValueError as error:
            return f"it is not valid JSON: {error}"
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            return schema_error(found)
    return None


def schema_error(schema: Any) -> str | None:
    """Why no output can be constrained to a JSON schema, found without compiling it; or None."""
    if (num := _num_optional(schema)) > MAX_OPTIONAL:
        return (
            f"it has an object with {num} properties in succession that are not required; at most "
            f"{MAX_OPTIONAL} are allowed"
        )
    return None


def _num_optional(schema: Any) -> int:
    most, schemas = 0, [schema]
    while schemas:
        one = schemas.pop()
        if not isinstance(one, dict) or not NOT_COUNTED.isdisjoint(one):
            continue
        schemas += (one.get("items"), one.get("additionalProperties"))
        properties = one.get("properties")
        if isinstance(properties, dict) and one.get("type", "object") == "object":
            schemas += properties.values()
            possible = (name for name, each in properties.items() if each is not False)
            required = one.get("required")
            names = required if isinstance(required, list) else []
            most = max(most, _longest_run_without(set(map(str, names)), possible))
    return most


def _longest_run_without(names: set[str], found: Iterable[str]) -> int:
    runs = groupby(found, lambda name: name in names)
    return max((len(list(run)) for is_named, run in runs if not is_named), default=0)


def _depth(text: str) -> int:
    """The nesting depth of brackets. Brackets in strings count too, so this is an upper bound."""
    depth = most = 0
    for char in text:
        if char in BRACKETS:
            depth = max(0, depth + BRACKETS[char])
            most = max(most, depth)
    return most
