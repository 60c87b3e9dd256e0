from html.parser import HTMLParser
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from schemathesis.core.result import Ok

from gateway.web.openapi import describe
from gateway.web.route import Route
from gateway.web.table import ROUTES
from tests.gateway.rig import Rig, Setting, played

DOCUMENT = describe(ROUTES.routes)
OPERATIONS = {
    (method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods
}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def test_every_route_is_described_under_its_method() -> None:
    assert len(OPERATIONS) == len(ROUTES.routes)
    served = {
        (method, each.path_format) for each in ROUTES.endpoints for method in each.methods or ()
    }
    assert {each for each in served if each[0] != "HEAD"} == OPERATIONS


def test_parameters_and_the_operation_id_follow_from_the_path() -> None:
    async def new_thing(http: Any) -> Any: ...

    route = Route("POST", "/v1/things/{thing_id:path}", "things", "A new thing.", new_thing)
    operation = describe([route])["paths"]["/v1/things/{thing_id}"]["post"]
    assert operation["operationId"] == "post_v1_things_thing_id"
    assert operation["parameters"][0]["name"] == "thing_id"


def test_the_document_says_which_paths_need_no_key() -> None:
    operations = [each for methods in DOCUMENT["paths"].values() for each in methods.values()]
    free = {each["operationId"] for each in operations if each.get("security") == []}
    assert free == {"get", "get_page_name", "get_health", "get_ready"}


def test_the_schemas_are_json_schema_and_refer_to_each_other_only() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate({"$schema": DIALECT} | schema)
    assert references(DOCUMENT) <= {f"#/components/schemas/{name}" for name in schemas}


def references(part: Any) -> set[str]:
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*(references(each) for each in part.values()))
    return set().union(*(references(each) for each in part)) if isinstance(part, list) else set()


def test_a_tool_that_reads_openapi_finds_every_operation() -> None:
    read = schemathesis.openapi.from_dict(DOCUMENT)
    found = [result.ok() for result in read.get_all_operations() if isinstance(result, Ok)]
    assert {(each.method.upper(), each.path) for each in found} == OPERATIONS


@pytest.mark.parametrize(
    ("schema", "value", "is_valid"),
    [
        ("ChatRequest", {"model": "m", "messages": [{"role": "user", "content": "x"}]}, True),
        ("ChatRequest", {"model": "m", "messages": [], "temperature": 2.5}, False),
        ("ChatRequest", {"model": "m", "messages": [], "n": 0}, False),
        ("ChatRequest", {"model": "m", "messages": [], "surprise": 1}, False),
        ("ChatRequest", {"messages": []}, False),
        ("CompletionRequest", {"model": "m", "prompt": [1, 2], "max_tokens": None}, True),
        ("CompletionRequest", {"model": "m", "prompt": "x", "max_tokens": 0.5}, False),
    ],
)
def test_the_schemas_have_the_request_fields(schema: str, value: Any, is_valid: bool) -> None:
    components = DOCUMENT["components"]
    whole = {"$ref": f"#/components/schemas/{schema}", "components": components}
    assert jsonschema_rs.validator_for(whole).is_valid(value) is is_valid


class Reader(HTMLParser):
    """What a page would fetch or run, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


@played()
async def test_the_page_lists_every_path_without_external_resources(rig: Rig) -> None:
    exchange = await rig.client.get("/docs")
    assert exchange.headers["content-type"].startswith("text/html")
    reader = Reader()
    reader.feed(exchange.content.decode())
    assert reader.links == ["openapi.json"]
    assert not reader.tags & {"script", "link", "img", "iframe"}
    assert all(path in reader.text for _, path in OPERATIONS)
    assert "number from 0 to 2" in reader.text
    assert (await rig.client.get("/openapi.json")).json == DOCUMENT


@played(Setting(keys=("k1",)))
async def test_a_browser_can_send_the_key_by_basic_authentication(rig: Rig) -> None:
    exchange = await rig.client.get("/docs")
    assert exchange.status == 401
    assert exchange.headers["www-authenticate"].startswith("Basic ")
    assert (await rig.client.get("/docs", {"authorization": "Basic bWU6azE="})).status == 200
