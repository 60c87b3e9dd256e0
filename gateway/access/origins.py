"""Origins: what web pages may do on a server that needs no API key.

A browser sends requests of any page to `127.0.0.1`. Two headers, which pages cannot forge, say
where they come from: `Origin` names the page's site in requests that change something, and `Host`
the name that the browser resolved, which for DNS rebinding is the attacker's. Where API keys are
needed a page has none, unless the browser remembers one that was typed (`Basic`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.types import Scope

from gateway.errors import Forbidden

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
ANY = "*"
PROXY_HEADERS = frozenset({b"forwarded", b"x-forwarded-for", b"x-real-ip"})


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address, or a name that is reserved for one (RFC 6761)."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


@dataclass(frozen=True, slots=True)
class OriginPolicy:
    """The rule for which `Host` and `Origin` headers are accepted.

    `listens_on_loopback`: the server's address is one; then remote clients cannot reach it, and
    only local hosts and `allowed_hosts` are accepted. Otherwise any host is, unless `allowed_hosts`
    names some.
    """

    listens_on_loopback: bool = False
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()

    def check(self, scope: Scope) -> None:
        """Raises `Forbidden` for another host, or for a request of another site's page that
        changes something or opens a WebSocket, whose messages the page could read."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        self._check_host(_name(host))
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        is_safe = scope["method"] in SAFE_METHODS and "podway.upgrade" not in scope
        if origin and not is_safe and not self._allows(origin, host):
            raise Forbidden(
                f"Requests from web pages of {origin[:200]!r} are not allowed; --cors-origin "
                "allows them."
            )

    def check_admin(self, scope: Scope) -> None:
        """Raises `Forbidden` unless the client is on this machine, and not a page of another site:
        the rule for `/admin` without API keys."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1").lower()
        client = (scope.get("client") or ("",))[0]
        if (
            not is_loopback(client)
            or (host and not is_loopback(_name(host)))
            or PROXY_HEADERS & headers.keys()
        ):
            raise Forbidden(
                "Without an admin API key, /admin can be used from the server's machine only; "
                "--admin-api-key sets one."
            )
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and not _is_same(origin, host):
            raise Forbidden(f"Web pages of {origin[:200]!r} may not use /admin.")

    def _check_host(self, name: str) -> None:
        hosts = self.allowed_hosts
        if not name or is_loopback(name) or ANY in hosts or name in map(str.lower, hosts):
            return
        if hosts or self.listens_on_loopback:
            raise Forbidden(f"The Host {name[:200]!r} is not allowed; --allowed-host allows it.")

    def _allows(self, origin: str, host: str) -> bool:
        allowed = self.cors_origins
        return ANY in allowed or origin in map(str.lower, allowed) or _is_same(origin, host)


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        address, _, port = host.partition("]")
        return f"{address}]" if not port or port.startswith(":") else host
    return host.partition(":")[0]


def _is_same(origin: str, host: str) -> bool:
    """Whether an origin, `scheme://host[:port]`, is that of the server."""
    return bool(host) and origin.partition("://")[2] == host
