import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gateway.images.fetch import CheckedResolver, MediaFetcher, is_public
from gateway.ports import UnreadableImage
from tests.certificates import make_certificate

PRIVATE = (
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
    "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "2001:db8::1",
)  # fmt: skip
PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_machines_and_their_networks_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


class Names:
    """Answers of a name server, one after the other; the last one is repeated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._answer)

    async def _answer(self, host: str, port: int, **_: object) -> list[object]:
        self.asked.append(host)
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        return [(socket.AF_INET, 1, 6, "", (address, port)) for address in answer]


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    """The host and port of an HTTPS server with good and bad pictures, and whom it trusts."""
    certificate, key = make_certificate(folder, "pictures")
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(certificate, key)

    async def answer(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name == "redirect":
            raise web.HTTPFound("http://169.254.169.254/secret")
        if name == "missing":
            raise web.HTTPNotFound(text="secret")
        if name == "packed":
            return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})
        return web.Response(body=b"p" * (2000 if name == "large" else 10))

    app = web.Application()
    app.router.add_get("/{name}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls)
    await site.start()
    assert isinstance(site._server, asyncio.Server)
    port = site._server.sockets[0].getsockname()[1]
    tls = ssl.create_default_context(cafile=certificate)
    tls.check_hostname = False  # the certificate is for an address
    try:
        yield f"pictures.test:{port}", tls
    finally:
        await runner.cleanup()


REFUSED = {
    "redirect": "is at a URL that redirects, which is not followed",
    "missing": "could not be fetched: its host answers 404",
    "packed": "is sent compressed by its host, which is not supported",
    "large": "has more than 0 MiB",
}


async def test_an_image_is_fetched_from_the_address_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []

    def is_allowed(address: str) -> bool:
        checked.append(address)
        return True

    async with serving(tmp_path) as (host, tls):
        names = Names(monkeypatch, ["127.0.0.1"])
        fetcher = MediaFetcher([host], 1000, CheckedResolver(is_allowed), tls)
        try:
            assert await fetcher.fetch(f"https://{host}/small") == b"p" * 10
            assert (names.asked, checked) == (["pictures.test"], ["127.0.0.1"])
            for name, reason in REFUSED.items():
                with pytest.raises(UnreadableImage) as caught:
                    await fetcher.fetch(f"https://{host}/{name}")
                assert str(caught.value) == reason
                assert caught.value.__cause__ is None
        finally:
            await fetcher.close()


async def test_a_host_whose_address_is_or_becomes_private_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (host, tls):
        answers = (["169.254.169.254"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"])
        names = Names(monkeypatch, *answers)
        fetcher = MediaFetcher([host], 1000, tls=tls)
        for _ in answers:
            with pytest.raises(UnreadableImage, match="is at a host whose address is not public"):
                await fetcher.fetch(f"https://{host}/small")
        assert len(names.asked) == len(answers)
        await fetcher.close()


BAD_URLS = (
    "http://pictures.test/a", "https://other.test/a", "https://pictures.test:444/a",
    "https://user@pictures.test/a", "https://pictures.test@other.test/a", "https://127.0.0.1/a",
    "https://other.test\\@pictures.test/a", "https://pictures.test.other.test/a", "https:///a",
    "https://pictures.test\t/a", "https://[::1]/a", "https://pictures.test:x/a", "https://é.test/",
    "ftp://pictures.test/a", "https://pictures.test/" + "a" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("url", BAD_URLS)
async def test_a_url_of_another_kind_or_host_is_not_looked_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(monkeypatch, ["8.8.8.8"])
    fetcher = MediaFetcher(["pictures.test"], 1000)
    with pytest.raises(UnreadableImage, match=r"has a URL|is at a host that this server"):
        await fetcher.fetch(url)
    assert not names.asked
    await fetcher.close()


async def test_a_host_that_cannot_be_reached_or_trusted_or_is_slow_is_named_without_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (host, _):
        Names(monkeypatch, ["127.0.0.1"])
        anywhere = CheckedResolver(lambda address: True)
        untrusting = MediaFetcher([host], 1000, anywhere)
        with pytest.raises(UnreadableImage, match=r"^could not be fetched$"):
            await untrusting.fetch(f"https://{host}/small")
        await untrusting.close()
        slow = MediaFetcher([host], 1000, anywhere, seconds=1e-9)
        with pytest.raises(UnreadableImage, match=r"^could not be fetched within 1e-09 seconds$"):
            await slow.fetch(f"https://{host}/small")
        await slow.close()


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    fetcher = MediaFetcher(["pictures.test"], 1000)
    session = fetcher._open()
    assert not session.trust_env
    assert isinstance(session.cookie_jar, aiohttp.DummyCookieJar)
    await fetcher.close()
    await fetcher.close()
