"""Fuzzed requests, made from the server's OpenAPI document. Seeded, so repeatable.

`Fuzzer.request` returns a request whose body is valid, almost valid (one value is of another type,
out of range, huge, deep, missing, doubled), or no JSON at all (cut off, invalid UTF-8, bytes
flipped). One request in five is for another operation than a POST of JSON: with identifiers from
earlier responses or odd ones in its path, odd query parameters, or an upload.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

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
    "completion_window": ("24h",),
    "endpoint": ("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    "policy": ("fcfs", "mlfq", "priority", "fair", "deadline"),
}


PROMPTS = frozenset({"input", "messages", "prompt"})  # half of the bodies have these
OTHERS = 0.2  # the share of requests that are no POST of JSON
ENDLESS = ("/admin/live", "/models/sse")  # their responses do not end
MAX_IDS = 64
BOUNDARY = "fuzzed"
JSON_TYPE = "application/json"


class Sent(NamedTuple):
    """A request; `operation` is its method and its path as the document has it."""

    path: str
    body: bytes
    method: str = "POST"
    content_type: str = JSON_TYPE
    operation: str = ""


class Fuzzer:
    """Requests for the operations of an OpenAPI document that take JSON; `model` is the served."""

    def __init__(self, document: Json, model: str, random: Random) -> None:
        self._random = random
        self._model = model
        self._schemas: Mapping[str, Json] = document["components"]["schemas"]
        self._bodies = list(_bodies(document))
        self._admin = list(_bodies(document, "/admin/"))
        self._others = list(_others(document))
        self._ids: list[str] = []  # of files, batches, responses and requests of this server
        self._share = 0.0  # of the optional fields that the next body has

    def learn(self, identifier: str) -> None:
        """Use this identifier, which a response contained, in the paths of later requests."""
        self._ids = [*self._ids[1 - MAX_IDS :], identifier]

    def any_request(self) -> Sent:
        """The next request, to any operation."""
        return self.other_request() if self._random.random() < OTHERS else self.request()

    def other_request(self) -> Sent:
        """The next request that is no POST of JSON."""
        random = self._random
        method, template, query, form = random.choice(self._others)
        path = re.sub(r"\{\w+\}", lambda _: quote(self._identifier(), safe=""), template)
        if query and random.random() < 0.7:
            pairs = {name: self._identifier() for name in query if random.random() < 0.5}
            path += "?" + urlencode(pairs)
        operation = f"{method} {template}"
        if form:
            content_type = f"multipart/form-data; boundary={BOUNDARY}"
            return Sent(path, self._form(form), method, content_type, operation)
        if template == "/admin/policy" and method == "POST":
            return self.request(is_admin=True)
        body = b"" if random.random() < 0.7 else self._bytes({})
        return Sent(path, body, method, "", operation)

    def _identifier(self) -> str:
        random = self._random
        if self._ids and random.random() < 0.7:
            return random.choice(self._ids)
        return random.choice((*TEXTS, "1", "-1", "20", "asc", "desc", "batch", "x" * 3000))

    def _form(self, names: tuple[str, ...]) -> bytes:
        """A multipart body; the file has lines for a batch. One in three is cut off or changed."""
        random, parts = self._random, b""
        for name in names:
            if random.random() < 0.1:
                continue
            value = b"\n".join(self._line(number) for number in range(random.randrange(1, 4)))
            filename = '; filename="lines.jsonl"' if name == "file" else ""
            if name != "file":
                value = random.choice((b"batch", b"batch", b"user_data", b"x", b""))
            head = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"{filename}'
            parts += head.encode() + b"\r\n\r\n" + value + b"\r\n"
        body = parts + f"--{BOUNDARY}--\r\n".encode()
        at = random.randrange(len(body))
        spoilt = random.choice((body[:at], body[:at] + random.randbytes(9) + body[at:]))
        return spoilt if random.random() < 1 / 3 else body

    def _line(self, number: int) -> bytes:
        sent = self.request()
        if self._random.random() < 0.2:
            return sent.body
        try:
            body = orjson.loads(sent.body)
        except ValueError:
            body = {}
        line = {"custom_id": str(number), "method": "POST", "url": sent.path, "body": body}
        return orjson.dumps(line)

    def request(self, is_admin: bool = False) -> Sent:
        """The next POST of JSON."""
        random = self._random
        template, schema = random.choice(self._admin if is_admin else self._bodies)
        self._share = random.choice((0.0, 0.02, 0.05, 0.2))
        value = self._sample(schema, 0)
        if isinstance(value, dict) and "model" in value and random.random() < 0.95:
            value["model"] = self._model
        if isinstance(value, dict):
            value |= {name: 4 for name in LENGTHS if name in value}
            if "input_file_id" in value and random.random() < 0.8:
                value["input_file_id"] = self._identifier()
        ways = (self._odd, self._several, self._raw, self._bytes)
        spoil = self._keep if random.random() < 0.3 else random.choice(ways)
        path = re.sub(r"[{}]", "", template)
        return Sent(path, spoil(value), operation=f"POST {template}")

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
            if name in required
            or (depth < 4 and self._random.random() < self._share)
            or (depth < 2 and name in PROMPTS and self._random.random() < 0.5)
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


def _bodies(document: Json, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Path and schema of the operations that take JSON: those of `/admin/` only if named."""
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in body and path.startswith("/admin/") == bool(prefix):
            yield path, body["application/json"]["schema"]


def _others(document: Json) -> Iterator[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    """Method, path, names of query parameters and of form parts of the other operations."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            if path in ENDLESS or ("application/json" in content and "/admin/" not in path):
                continue
            query = (
                each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"
            )
            form = content.get("multipart/form-data", {}).get("schema", {}).get("properties", {})
            yield method.upper(), path, tuple(query), tuple(form)


def _places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree of objects and arrays, as owner and key."""
    if isinstance(value, dict | list):
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(part)
