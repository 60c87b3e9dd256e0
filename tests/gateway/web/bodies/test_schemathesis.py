"""schemathesis over our own OpenAPI document, against a live server.

It makes what the document allows and what it forbids, and holds the answers to it.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import compile_path

from gateway.web.table import ROUTES
from tests.gateway.rig import Setting
from tests.gateway.serve.live import listening

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
)
NOTHING_VARIES = {"/openapi.json", "/docs", "/health", "/metrics", "/"}
ENDLESS = {"/admin/live", "/models/sse"}
ASKED = [
    (route.method, compile_path(route.path)[1], mode)
    for route in ROUTES.routes
    for mode in GenerationMode
    if route.path not in NOTHING_VARIES | ENDLESS
    and (mode is GenerationMode.POSITIVE or route.body or route.form or route.query)
]


@pytest.fixture(scope="module")
def api() -> Iterator[Any]:
    with listening(Setting(step=0.0005, max_queue_requests=1000)) as live:
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{live.port}/openapi.json")


@pytest.mark.parametrize(("method", "path", "mode"), ASKED)
def test_responses_match_the_openapi_document(
    api: Any, method: str, path: str, mode: GenerationMode
) -> None:
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    @settings(
        max_examples=6,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        case.call_and_validate(checks=CHECKS, timeout=30)

    ask()
