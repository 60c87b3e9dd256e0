"""Requests made from OpenAI's own description of them (`tests/data/openai_requests.json.gz`).

    python -m tests.fuzz.openai_requests [--examples 200] [--seed 0]

All of them are valid there. The server may not support one: then its error names the field. No
answer is a 5xx, and those that succeed have OpenAI's shape, which the server under test checks
itself (`tests.wire.response_check`). Prints the statuses by operation.
"""

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.gateway.rig import MODEL, Setting
from tests.gateway.serve.live import listening

Json = dict[str, Any]
SETTING = Setting(step=0.0005, max_queue_requests=1000)
MAX_OPTIONAL = 3  # fields of a body that are not required: with more, few are supported
PLAIN: Mapping[str, Json] = {  # what half of the bodies have, so that some are answered
    "/completions": {"prompt": "Once"},
    "/responses": {"input": "Hello!"},
    "/responses/input_tokens": {"input": "Hello!"},
    "/batches": {"endpoint": "/v1/completions"},
}
# Errors about no field: other bodies than objects, and what is refused as a whole.
ABOUT_ALL = ("Invalid request body", "The request body is ", "Compaction is not")
_FILE = Path(__file__).parents[1] / "data" / "openai_requests.json.gz"


class Operation(NamedTuple):
    """A method and a path, as the description has it, and the fields of its JSON body."""

    method: str
    path: str
    fields: Mapping[str, Json]
    required: frozenset[str]


@cache
def document() -> Json:
    """The description of the operations that the server has."""
    described: Json = json.loads(gzip.decompress(_FILE.read_bytes()))
    return described


def operations() -> Iterator[Operation]:
    """All of them."""
    for path, methods in document()["paths"].items():
        for method, each in methods.items():
            content = each.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            fields, required = _fields(schema)
            yield Operation(method.upper(), path, fields, frozenset(required))


def _fields(schema: Json) -> tuple[dict[str, Json], list[str]]:
    """The properties of an object, also of its parts, and the names of the required ones."""
    if "$ref" in schema:
        return _fields(document()["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]])
    fields, required = dict(schema.get("properties", {})), list(schema.get("required", ()))
    for part in schema.get("allOf", ()):
        more, needed = _fields(part)
        fields |= more
        required += needed
    return fields, required


def ask(url: str, operation: Operation, num_examples: int, number: int = 0) -> Counter[int]:
    """Send requests, and count the statuses. Raises `AssertionError` for an answer that is wrong.

    `url` ends with /v1. `number` chooses other requests.
    """
    statuses: Counter[int] = Counter()
    api = schemathesis.openapi.from_dict(document())
    described = api[operation.path][operation.method]
    optional = sorted(operation.fields.keys() - operation.required)
    some = st.sets(st.sampled_from(optional), max_size=MAX_OPTIONAL) if optional else st.just(set())

    known = made(url)

    @seed(number)
    @given(
        case=described.as_strategy(generation_mode=GenerationMode.POSITIVE),
        kept=some,
        is_plain=st.booleans(),
    )
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any, kept: set[str], is_plain: bool) -> None:
        if isinstance(case.body, dict) and operation.fields:
            named = kept | operation.required
            case.body = {name: value for name, value in case.body.items() if name in named}
            plain = PLAIN[operation.path] if is_plain and operation.path in PLAIN else {}
            plain = {"model": MODEL, "input_file_id": known["file_id"], **plain}
            case.body |= {name: plain[name] for name in plain.keys() & operation.fields.keys()}
        if is_plain:
            case.path_parameters.update({name: known[name] for name in case.path_parameters})
        response = case.call(base_url=url, timeout=30)
        statuses[response.status_code] += 1
        check(response, case.body)

    send()
    return statuses


def made(url: str) -> dict[str, str]:
    """The ids of what the paths can name, made for the purpose."""
    line: Json = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}
    line["body"] = {"model": MODEL, "prompt": "Once"}
    uploaded = {"file": ("in.jsonl", json.dumps(line))}
    file = requests.post(f"{url}/files", files=uploaded, data={"purpose": "batch"}, timeout=30)
    file_id = file.json()["id"]

    def post(path: str, body: Json) -> str:
        return str(requests.post(f"{url}/{path}", json=body, timeout=30).json()["id"])

    times = {"endpoint": "/v1/completions", "completion_window": "24h"}
    item = {"role": "user", "content": "Hello!", "type": "message"}
    conversation = requests.post(f"{url}/conversations", json={"items": [item]}, timeout=30).json()
    listed = requests.get(f"{url}/conversations/{conversation['id']}/items", timeout=30).json()
    return {
        "file_id": file_id,
        "batch_id": post("batches", {"input_file_id": file_id, **times}),
        "response_id": post("responses", {"model": MODEL, "input": "Hello!"}),
        "conversation_id": conversation["id"],
        "item_id": listed["data"][0]["id"],
        "model": MODEL,
    }


def check(response: Any, body: Any) -> None:
    """Raise `AssertionError` for a 5xx, and for an error that names neither a field nor an id."""
    if response.status_code < 400:
        return
    assert response.status_code < 500, (response.text, body)
    error = response.json()["error"]
    is_about_all = response.status_code == 404 or error["message"].startswith(ABOUT_ALL)
    assert error["param"] or is_about_all, (error, body)


def main() -> None:
    """Send requests to each operation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=200, help="for each operation")
    parser.add_argument("--seed", type=int, default=0)
    given_flags = parser.parse_args()
    total: Counter[int] = Counter()
    with listening(SETTING) as live:
        for each in operations():
            statuses = ask(live.url, each, given_flags.examples, given_flags.seed)
            total += statuses
            sys.stdout.write(f"{each.method} {each.path} {dict(sorted(statuses.items()))}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{total.total():,} requests: {dict(sorted(total.items()))}\n")


if __name__ == "__main__":
    main()
