"""Fetches images of URLs by HTTPS from hosts that the operator has named, and from no others.

A host's addresses are looked up here, checked, and connected to as they were checked, so that a
name that resolves to something else a moment later gains nothing. Redirects are not followed, no
proxy is used, and no cookies are kept. Errors repeat nothing of what the host has answered.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Collection
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from gateway.ports import UnreadableImage

SECONDS = 10.0
MAX_URL = 4_096  # characters
MAX_CONNECTIONS = 8
PIECE_BYTES = 1 << 16
HTTPS_PORT = 443
_NAT64 = IPv6Network("64:ff9b::/96")
_NUMERIC = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV


class AddressRefused(OSError):
    """A host has an address that images are not fetched from."""


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, and not to this machine or its networks;
    of an IPv6 address that contains one of IPv4, both must."""
    ip = ip_address(address.partition("%")[0])
    inner: list[IPv4Address | IPv6Address] = [ip]
    if isinstance(ip, IPv6Address):
        contained = (ip.ipv4_mapped, ip.sixtofour, *(ip.teredo or ()))
        inner += [each for each in contained if each is not None]
        if ip in _NAT64:
            inner.append(IPv4Address(int(ip) & 0xFFFFFFFF))
        if ip.ipv4_mapped is not None:
            inner.remove(ip)
    return all(each.is_global and not each.is_multicast for each in inner)


class CheckedResolver(AbstractResolver):
    """Looks a host's addresses up and refuses all of them if one is not allowed."""

    def __init__(self, is_allowed: Callable[[str], bool] = is_public) -> None:
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        entries = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        addresses = [(kind, str(place[0])) for kind, _, _, _, place in entries]
        if not all(self._is_allowed(address) for _, address in addresses):
            raise AddressRefused
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=kind, proto=0, flags=_NUMERIC
            )
            for kind, address in addresses
        ]

    async def close(self) -> None:
        """It keeps nothing."""


class MediaFetcher:
    """Fetches from `hosts`: names, or names with a port."""

    def __init__(
        self,
        hosts: Collection[str],
        max_bytes: int,
        resolver: AbstractResolver | None = None,
        tls: ssl.SSLContext | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._resolver = resolver or CheckedResolver()
        self._tls = tls or ssl.create_default_context()
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str) -> bytes:
        """The body of a response. Raises `UnreadableImage`."""
        place = self._checked(url)
        try:
            async with self._open().get(place, allow_redirects=False) as response:
                return await self._body(response)
        except TimeoutError:
            reason = f"could not be fetched within {self._seconds:g} seconds"
        except aiohttp.ClientConnectorError as error:
            reason = "could not be fetched"
            if isinstance(error.os_error, AddressRefused):
                reason = "is at a host whose address is not public"
        except AddressRefused:
            reason = "is at a host whose address is not public"
        except (aiohttp.ClientError, OSError, ValueError):
            reason = "could not be fetched"
        raise UnreadableImage(reason)

    def _checked(self, url: str) -> URL:
        """The URL as it will be requested; nothing else parses it again."""
        if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or "\\" in url:
            raise UnreadableImage("has a URL that is too long or has unusual characters")
        try:
            place = URL(url)
            host, port = place.host or "", place.port
        except ValueError:
            raise UnreadableImage("has a URL that is not valid") from None
        if place.scheme != "https":
            raise UnreadableImage("has a URL that is not one of HTTPS")
        name = host.lower() if port == HTTPS_PORT else f"{host.lower()}:{port}"
        if name not in self._hosts or place.user is not None or place.password is not None:
            raise UnreadableImage("is at a host that this server does not fetch images from")
        return place

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=self._resolver,
                use_dns_cache=False,
                ssl=self._tls,
                limit=MAX_CONNECTIONS,
                force_close=True,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._seconds),
                headers={"Accept": "image/*", "Accept-Encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        if 300 <= response.status < 400:
            raise UnreadableImage("is at a URL that redirects, which is not followed")
        if response.status != 200:
            raise UnreadableImage(f"could not be fetched: its host answers {response.status}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise UnreadableImage("is sent compressed by its host, which is not supported")
        body = bytearray()
        async for piece in response.content.iter_chunked(PIECE_BYTES):
            body += piece
            if len(body) > self._max_bytes:
                raise UnreadableImage(f"has more than {self._max_bytes >> 20} MiB")
        return bytes(body)

    async def close(self) -> None:
        """Close its connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
