"""The table of routes: which requests count against limits, which need an admin key, and which
path belongs to which route."""

import pytest

from gateway.access.key_file import Allowance
from gateway.web.route import Access
from gateway.web.table import ROUTES
from tests.gateway.rig import Rig, Setting, played

TENANT = {"x-api-key": "k"}


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("GET", "/v1/models/org/name", "/v1/models/{model:path}"),
        ("HEAD", "/v1/models", "/v1/models"),
        ("POST", "/v1/requests/a/b/cancel", "/v1/requests/{request_id:path}/cancel"),
        ("DELETE", "/admin/policy", "/admin/policy"),
        ("GET", "/v1/responses/resp_1/cancel/more", None),
        ("GET", "/v1/responses/input_tokens", "/v1/responses/{response_id}"),
        ("GET", "/nowhere", None),
    ],
)
def test_a_request_has_the_route_of_its_path(method: str, path: str, route: str | None) -> None:
    found = ROUTES.find(method, path)
    assert (None if found is None else found.path) == route


def test_each_route_is_found_by_its_own_method_and_path() -> None:
    for route in ROUTES.routes:
        path = route.path.replace(":path}", "}").replace("{", "").replace("}", "")
        assert ROUTES.find(route.method, path) is route, route.path


def test_routes_below_admin_and_those_that_load_need_an_admin_key() -> None:
    admin = {route.path for route in ROUTES.routes if route.access is Access.ADMIN}
    assert admin == {
        "/admin/live",
        "/admin/policy",
        "/admin/simulate",
        "/models/load",
        "/models/unload",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    }


@pytest.mark.parametrize("is_metered", [True, False])
@played(Setting(keys=("k",), allowance=Allowance(requests_per_minute=2)))
async def test_the_limit_on_requests_holds_for_all_routes_that_cost_and_for_no_other(
    rig: Rig,
    is_metered: bool,
) -> None:
    for _ in range(2):
        await rig.client.get("/v1/batches", TENANT)
    for route in ROUTES.routes:
        if route.is_metered is not is_metered or route.path == "/admin/live":
            continue
        path = route.path.replace(":path}", "}").replace("{", "").replace("}", "")
        async with rig.client.send(route.method, path, headers=TENANT) as exchange:
            assert (await exchange.start() == 429) is is_metered, route.path


def test_every_route_with_a_plan_is_metered() -> None:
    assert all(route.is_metered for route in ROUTES.routes if route.plan is not None)


@pytest.mark.parametrize("end", ["\n", "/", "%0a", "\x00", " "])
@played(Setting(keys=("k",), admin_keys=("a",)))
async def test_no_spelling_of_a_path_reaches_a_route_whose_access_was_not_checked(
    rig: Rig, end: str
) -> None:
    for route in ROUTES.routes:
        if route.access is not Access.ADMIN:
            continue
        async with rig.client.send(route.method, route.path + end, headers=TENANT) as exchange:
            assert await exchange.start() in (403, 404), route.path
