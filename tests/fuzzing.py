"""Bodies to fuzz with: made from our own OpenAPI document, then spoiled. Seeded, so repeatable.

`Fuzzer.request` yields a path and a body that is, by turns, right, almost right (one value is of
another kind, out of range, huge, deep, missing, doubled), or no JSON at all (cut off, invalid
UTF-8, bytes flipped).
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple

import orjson

Json = Any
RAW = "@@raw@@"  # stands for JSON that no encoder writes
TEXTS = (
    "",
    "a",
    "Hello!",
    "ü🙂",
    "\x00",
    "a\u2028b",
    "</think>",
    "<tool_call>",
    "x" * 300,
    "0",
    "null",
)
ODD: tuple[Json, ...] = (
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**53 + 1, 2**63 - 1,
    -(2**63), 2**64 - 1, "", "x", "x" * 5000, "1", [], {}, [None], [[]], {"a": None}, [0] * 500,
    ["x"] * 50, {"": ""}, {"type": "x"}, {"type": None}, "\x00", "🙂", "$ref", {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}}, {"type": "json_schema"},
)  # fmt: skip
RAWS = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 400, b"-" + b"9" * 40, b'"\\ud800"',
    b'"\\udc00x"', b"01", b"1.", b".5", b"'a'", b"[" * 3000, b"{" * 20, b"[" * 200 + b"]" * 200,
    b'{"a":' * 200 + b"1" + b"}" * 200, b'"\xff\xfe"', b'"\xc3"', b'"\x01"', b"undefined",
    b'{"a":1,"a":2}',
)  # fmt: skip
LENGTHS = ("max_tokens", "max_output_tokens", "max_completion_tokens")
WORDS: Mapping[str, tuple[Json, ...]] = {
    "role": ("user", "assistant", "system", "developer"),
    "content": ("Hello!", "", "What is 2 + 3?", [{"type": "text", "text": "x"}]),
    "messages": (
        [{"role": "user", "content": "Hello!"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ),
    "type": ("text", "function", "json_object", "json_schema", "message"),
    "service_tier": ("auto", "default", "flex", "priority"),
    "reasoning_effort": ("low", "high"),
    "tool_choice": ("auto", "none", "required"),
    "tools": (
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        [],
    ),
    "response_format": (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}},
        {"type": "text"},
    ),
    "prompt": ("Once", [1, 2], ["a", "b"], [[1], [2]], ""),
    "input": ("Hello!", ["a", "b"], [{"role": "user", "content": "x"}]),
    "stop": ("x", ["a", "\n"], []),
    "n": (1, 2, 3),
    "temperature": (0, 1, 2),
    "logit_bias": ({"5": 1.5}, {}),
    "arguments": ("{}", "x"),
}


class Sent(NamedTuple):
    """What to POST where."""

    path: str
    body: bytes


class Fuzzer:
    """Requests for the operations of an OpenAPI document that take JSON; `model` is the served."""

    def __init__(self, document: Json, model: str, random: Random) -> None:
        self._random = random
        self._model = model
        self._schemas: Mapping[str, Json] = document["components"]["schemas"]
        self._bodies = list(_bodies(document))
        self._share = 0.0  # of the optional fields that the next body has

    def request(self) -> Sent:
        """The next."""
        random = self._random
        path, schema = random.choice(self._bodies)
        self._share = random.choice((0.02, 0.05, 0.2))
        value = self._sample(schema, 0)
        if isinstance(value, dict) and "model" in value and random.random() < 0.95:
            value["model"] = self._model
        if isinstance(value, dict):
            value |= {name: 4 for name in LENGTHS if name in value}
        ways = (self._odd, self._several, self._raw, self._bytes)
        spoil = self._keep if random.random() < 0.3 else random.choice(ways)
        return Sent(path, spoil(value))

    def _keep(self, value: Json) -> bytes:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)

    def _odd(self, value: Json) -> bytes:
        return self._keep(self._changed(value, self._random.choice(ODD)))

    def _several(self, value: Json) -> bytes:
        for _ in range(self._random.randrange(2, 6)):
            value = self._changed(value, self._random.choice(ODD))
        return self._keep(value)

    def _raw(self, value: Json) -> bytes:
        packed = self._keep(self._changed(value, RAW))
        return packed.replace(b'"' + RAW.encode() + b'"', self._random.choice(RAWS))

    def _bytes(self, value: Json) -> bytes:
        body, random = bytearray(self._keep(value)), self._random
        at = random.randrange(len(body) + 1)
        ways: tuple[Callable[[], bytes], ...] = (
            lambda: bytes(body[:at]),
            lambda: bytes(body[:at]) + random.randbytes(random.randrange(1, 20)) + bytes(body[at:]),
            lambda: bytes(body) + b"}" * random.randrange(1, 5),
            lambda: bytes(body).decode().encode("utf-16"),
            lambda: b"\xef\xbb\xbf" + bytes(body),
            lambda: random.choice(RAWS),
            lambda: b"",
        )
        return random.choice(ways)()

    def _changed(self, value: Json, to: Json) -> Json:
        """With one place, anywhere, put to something else, taken away, or wrapped."""
        value = deepcopy(value)
        places = list(_places(value))
        if not places:
            return to
        owner, key = self._random.choice(places)
        way = self._random.random()
        if to != RAW and way < 0.1:
            del owner[key]
        elif to != RAW and way < 0.2:
            owner[key] = [owner[key]]
        elif way < 0.3 and isinstance(owner, dict):
            owner["surprise"] = to
        else:
            owner[key] = to
        return value

    def _sample(self, schema: Json, depth: int) -> Json:
        """An instance of a schema, or nearly: formats and lengths are left to chance."""
        random = self._random
        if "$ref" in schema:
            return self._sample(self._schemas[schema["$ref"].rsplit("/", 1)[1]], depth + 1)
        for choice in ("anyOf", "oneOf"):
            if choice in schema:
                return self._sample(random.choice(schema[choice]), depth)
        if "enum" in schema:
            return random.choice(schema["enum"])
        kind = schema.get("type")
        made = self._SAMPLES.get(kind if isinstance(kind, str) else "any", Fuzzer._any)
        return made(self, schema, depth)

    def _object(self, schema: Json, depth: int) -> Json:
        required = schema.get("required", ())
        return {
            name: self._field(name, field, depth + 1)
            for name, field in schema.get("properties", {}).items()
            if name in required or (depth < 4 and self._random.random() < self._share)
        }

    def _field(self, name: str, schema: Json, depth: int) -> Json:
        if name in WORDS and self._random.random() < 0.9:
            return self._random.choice(WORDS[name])
        return self._sample(schema, depth)

    def _array(self, schema: Json, depth: int) -> Json:
        items = schema.get("items", {})
        return [self._sample(items, depth + 1) for _ in range(self._random.randrange(3))]

    def _number(self, schema: Json, depth: int) -> Json:
        low, high = schema.get("minimum", -2), schema.get("maximum", 3)
        return self._random.uniform(max(low, -1e6), min(high, 1e6))

    def _integer(self, schema: Json, depth: int) -> Json:
        low, high = schema.get("minimum", 0), min(schema.get("maximum", 5), 5)
        return self._random.randint(max(int(low), -5), max(int(low), int(high)))

    def _any(self, schema: Json, depth: int) -> Json:
        return self._random.choice(ODD)

    def _string(self, schema: Json, depth: int) -> Json:
        words = ("user", "assistant", "system", "tool", "text", "function", "auto", "none", *TEXTS)
        return self._random.choice(words)

    _SAMPLES: Mapping[str, Callable[["Fuzzer", Json, int], Json]] = {
        "object": _object,
        "array": _array,
        "number": _number,
        "integer": _integer,
        "string": _string,
        "boolean": lambda self, schema, depth: self._random.random() < 0.5,
        "null": lambda self, schema, depth: None,
        "any": _any,
    }


def is_honest(status: int, sent: Sent) -> bool:
    """Whether it is no fault of the server's: full (503), or late by the request's own deadline."""
    return status < 500 or status == 503 or (status == 504 and b"deadline_ms" in sent.body)


def _bodies(document: Json) -> Iterator[tuple[str, Json]]:
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in body and not path.startswith("/admin/"):
            yield path.replace("{", "").replace("}", ""), body["application/json"]["schema"]


def _places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree of objects and arrays, as owner and key."""
    if isinstance(value, dict | list):
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(part)
