from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.access.origins import OriginPolicy
from gateway.errors import Forbidden
from tests.gateway.forms import a_form
from tests.gateway.rig import CHAT, Rig, Setting, play, played

LOCAL = {"host": "127.0.0.1:8000"}
PAGE = {"origin": "https://evil.example"}
POLICY = "/admin/policy"
REMOTE = Setting(listens_on_loopback=False)


async def status_of(
    rig: Rig,
    path: str,
    headers: Mapping[str, str],
    method: str = "POST",
    client: str = "127.0.0.1",
) -> int:
    body = {POLICY: b'{"policy": "mlfq"}'}.get(path, b"{}")
    return (await rig.client.send(method, path, [body], headers, client)).status


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", POLICY),
        ("POST", CHAT),
        ("POST", "/v1/files"),
        ("DELETE", "/v1/files/file-1"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/batches/b/cancel"),
        ("POST", "/v1/responses"),
        ("DELETE", "/v1/responses/r"),
        ("POST", "/v1/requests/r/cancel"),
        ("POST", "/tokenize"),
    ],
)
@played()
async def test_a_page_of_another_site_changes_nothing_on_an_open_server(
    rig: Rig, method: str, path: str
) -> None:
    """A page can send such a request without a preflight, as text of a form or a Blob."""
    for headers in (LOCAL | PAGE, LOCAL | {"origin": "null"}):
        assert await status_of(rig, path, headers, method) == 403
        assert await status_of(rig, path, {"host": "evil.example"} | headers, method) == 403
    rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    assert await status_of(rig, path, rebound, method) == 403
    same = LOCAL | {"origin": "http://127.0.0.1:8000"}
    assert await status_of(rig, path, same, method) != 403


@played()
async def test_an_upload_of_another_sites_page_is_rejected_with_the_flag_that_allows_it(
    rig: Rig,
) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b", **LOCAL, **PAGE}
    exchange = await rig.client.send("POST", "/v1/files", [a_form(b"{}")], headers)
    error = exchange.json["error"]
    assert (exchange.status, error["code"]) == (403, "permission_denied")
    assert "https://evil.example" in error["message"]
    assert "--cors-origin" in error["message"]


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        (Setting(), {"localhost:8000", "[::1]:8000", "127.8.8.8", "app.localhost", "localhost"}),
        (REMOTE, {"api.example", "10.0.0.7:8000", "evil.example", "localhost"}),
        (Setting(allowed_hosts=("Api.Example",)), {"api.example", "api.example:443", "localhost"}),
        (Setting(allowed_hosts=("*",)), {"api.example", "evil.example", "10.0.0.7:8000"}),
        (
            Setting(listens_on_loopback=False, allowed_hosts=("api.example",)),
            {"api.example", "localhost"},
        ),
    ],
)
def test_which_hosts_are_accepted(setting: Setting, allowed: set[str]) -> None:
    hosts = {"api.example", "evil.example", "10.0.0.7:8000"} | allowed

    async def scene(rig: Rig) -> None:
        for host in sorted(hosts):
            for method in ("GET", "POST"):
                path = "/v1/models" if method == "GET" else "/v1/files/x"
                status = await status_of(rig, path, {"host": host}, method, "10.1.1.1")
                is_allowed = setting is REMOTE or host in allowed
                assert (status != 403) == is_allowed, (host, method)

    play(scene, setting)


def test_pages_of_an_allowed_origin_may_use_the_api_but_not_admin() -> None:
    async def scene(rig: Rig) -> None:
        headers = LOCAL | {"origin": "https://app.example"}
        assert await status_of(rig, CHAT, headers) == 400
        assert await status_of(rig, POLICY, headers) == 403

    play(scene, Setting(cors_origins=("https://app.example",)))
    play(scene, Setting(cors_origins=("*",)))


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        (LOCAL, "10.1.1.1"),
        (LOCAL | {"x-forwarded-for": "10.1.1.1"}, "127.0.0.1"),
        ({"host": "api.example"}, "127.0.0.1"),
        (LOCAL | PAGE, "127.0.0.1"),
    ],
)
@played(REMOTE)
async def test_without_keys_admin_needs_a_client_on_the_same_machine(
    rig: Rig, headers: Mapping[str, str], client: str
) -> None:
    for method in ("GET", "POST"):
        assert await status_of(rig, POLICY, headers, method, client) == 403
    assert await status_of(rig, POLICY, LOCAL) == 200
    assert await status_of(rig, POLICY, {"host": "[::1]:1"}, client="::1") == 200
    assert await status_of(rig, "/v1/models", headers, "GET", client) == 200


def test_with_keys_admin_needs_an_admin_key_from_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "k1"\n[root]\nkey = "k2"\nadmin = true')

    async def scene(rig: Rig) -> None:
        for key, status in (("k1", 403), ("k2", 200), ("k3", 200), ("k4", 403), ("k5", 401)):
            headers = {"x-api-key": key, "host": "api.example", **PAGE}
            assert await status_of(rig, POLICY, headers, client="10.1.1.1") == status
            assert (await status_of(rig, POLICY, headers, "GET", "10.1.1.1")) == status
        assert await status_of(rig, CHAT, {"x-api-key": "k3"}) == 400

    play(scene, Setting(keys=("k4",), admin_keys=("k3",), key_file=path))


@played(Setting(keys=("k1",)))
async def test_a_key_that_the_browser_remembers_does_not_serve_other_sites_pages(rig: Rig) -> None:
    basic = {"authorization": "Basic " + b64encode(b":k1").decode()}
    assert await status_of(rig, "/v1/models", LOCAL | basic, "GET") == 200
    assert await status_of(rig, CHAT, LOCAL | basic) == 400
    assert await status_of(rig, CHAT, LOCAL | basic | PAGE) == 403
    assert await status_of(rig, CHAT, LOCAL | PAGE | {"x-api-key": "k1"}) == 400


@pytest.mark.parametrize("host", ["[::1]anything", "[::1]x:80"])
def test_a_host_that_only_begins_like_a_loopback_address_is_refused(host: str) -> None:
    policy = OriginPolicy(listens_on_loopback=True)
    with pytest.raises(Forbidden):
        policy.check({"headers": [(b"host", host.encode())], "method": "GET"})
