"""Callers: the identity of each HTTP request, and the rate limits of API keys on requests, tokens
and concurrent requests.

Token buckets: a bucket holds at most one minute's limit and refills steadily. A request takes one
from its key's request bucket on arrival. Tokens are charged when their number is known: the prompt
when the engine accepts the request, the output when it ends. The token bucket may become negative;
then the key's requests are rejected until it has refilled. So no request is rejected for tokens
that it might use.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from starlette.types import Scope

from engine.iteration import Observer
from engine.request import Request
from gateway.access.key_file import Allowance, Key
from gateway.errors import TooManyRequests, TooManyTokens
from gateway.observe.request_log import RequestRecord
from gateway.schema.decoding import UnknownFields
from gateway.schema.dialect import OPENAI, ApiDialect

_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@#-]{1,128}")
OPENAI_VERSION = "2020-10-01"
AT_ONCE_RETRY_SECONDS = 1.0  # a guess: when a running request ends is unknown


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity of one HTTP request. `arrived_at` is in seconds of the service's clock.

    `limits` are the response headers about the rate limits of its API key. `dialect` renders the
    errors and headers of the path's API. `record` is the request's entry in the request log.
    `reports` are headers of the response that say how the request was understood. `turn` is that of
    a message of a WebSocket: what its connection knows of the conversation
    (`gateway.generation.turn`). `network` is the address, or the network of an IPv6 one.
    """

    request_id: str
    arrived_at: float
    key: Key = Key("", ())  # noqa: RUF009 # frozen; that of a server without keys
    limits: Mapping[str, str] = field(default_factory=dict)
    dialect: ApiDialect = OPENAI
    unknown_fields: UnknownFields = field(default_factory=UnknownFields, compare=False)
    record: RequestRecord | None = field(default=None, compare=False)
    reports: dict[str, str] = field(default_factory=dict, compare=False)
    turn: object | None = field(default=None, compare=False)
    network: str = ""

    @property
    def tenant(self) -> str:
        """The name of its API key, "" on a server without keys."""
        return self.key.name

    @property
    def client(self) -> str:
        """The caller that takes turns with others: the API key, or on a server without keys its
        network."""
        return self.tenant or self.network

    def authenticated(self, key: Key) -> "Caller":
        """The same request with its API key."""
        if self.record is not None:
            self.record.key = key.name
        return replace(self, key=key)

    def note(self, error_code: str) -> None:
        """The request log's reason of this request."""
        if self.record is not None:
            self.record.reason = error_code

    def salt(self, cache_salt: str) -> str:
        """The engine's salt for a request with this `cache_salt`: no two pairs of domain and
        `cache_salt` have the same."""
        domain = self.key.cache_domain
        return cache_salt if domain is None else f"{len(domain)}:{domain}{cache_salt}"

    def headers(self, now: float) -> dict[str, str]:
        """Headers of every response; `now` is in seconds of the service's clock."""
        name = self.dialect.request_id_header
        return {
            **({} if name is None else {name: self.request_id}),
            "x-request-id": self.request_id,
            "openai-processing-ms": str(round((now - self.arrived_at) * 1000)),
            "openai-version": OPENAI_VERSION,
            **self.limits,
            **self.reports,
            **(self.unknown_fields.headers() if self.unknown_fields.ignored else {}),
        }


def header_of(scope: Scope, name: bytes) -> str | None:
    """The last header of that name."""
    value = dict(scope["headers"]).get(name)
    return None if value is None else value.decode("latin-1")


def valid_request_id(offered: str | None) -> str | None:
    """The client's x-request-id if it is at most 128 printable characters, else None."""
    return offered if offered is not None and _VALID_ID.fullmatch(offered) else None


@dataclass(slots=True)
class _Bucket:
    """`level` at time `at` (seconds of the service's clock); negative while tokens are owed."""

    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        self.level = min(per_minute, self.level + (now - self.at) * per_minute / 60)
        self.at = now

    def seconds_to(self, level: float, per_minute: int) -> float:
        return max(0.0, (level - self.level) * 60 / per_minute)


@dataclass(slots=True, eq=False)
class _Account:
    """The buckets of a key; `line_tokens` is that of its batch lines. `allowance` is that of its
    latest request."""

    allowance: Allowance
    requests: _Bucket
    tokens: _Bucket
    line_tokens: _Bucket
    num_running: int = 0


@dataclass(slots=True)
class Quotas(Observer):
    """The accounts of all keys. As an observer of the engine it learns the tokens used."""

    _accounts: dict[str, _Account] = field(default_factory=dict)
    _unattended: Counter[str] = field(default_factory=Counter)  # running without a connection

    def enter(self, key: Key, now: float) -> Mapping[str, str]:
        """Count a request; returns the response headers about the key's limits.

        Raises `TooManyRequests` or `TooManyTokens`. After success `leave` must be called once.
        """
        allowance = key.allowance
        account = self._account(key, now)
        self._check(account, key)
        if allowance.requests_per_minute:
            account.requests.level -= 1
        account.num_running += 1
        return _headers(account)

    def leave(self, key: Key) -> None:
        """The request has ended."""
        self._accounts[key.name].num_running -= 1

    def add_running(self, name: str, num_running: int) -> None:
        """A key has so many more (or fewer) running requests that no connection waits for."""
        self._unattended[name] += num_running

    def arrived(self, request: Request, now: float) -> None:
        """Charge the prompt, without what another request of the response is charged for."""
        self._charge(request, request.spec.own_len, now)

    def ended(self, request: Request, now: float) -> None:
        """Charge the output."""
        self._charge(request, request.produced, now)

    def line_delay(self, key: Key, now: float) -> float:
        """Seconds until a batch line of this key may run."""
        limit = key.allowance.tokens_per_minute
        return self._account(key, now).line_tokens.seconds_to(1, limit) if limit else 0.0

    def _charge(self, request: Request, num_tokens: int, now: float) -> None:
        """Lines of batches have a bucket of their own, so that they do not stop other requests."""
        account = self._accounts.get(request.spec.tenant)
        if account is not None and (limit := account.allowance.tokens_per_minute):
            bucket = account.line_tokens if request.spec.is_background else account.tokens
            bucket.refill(limit, now)
            bucket.level -= num_tokens

    def _account(self, key: Key, now: float) -> _Account:
        allowance = key.allowance
        account = self._accounts.get(key.name)
        if account is None:
            account = self._accounts[key.name] = _Account(
                allowance,
                _Bucket(allowance.requests_per_minute, now),
                _Bucket(allowance.tokens_per_minute, now),
                _Bucket(allowance.tokens_per_minute, now),
            )
        account.allowance = allowance
        account.requests.refill(allowance.requests_per_minute, now)
        account.tokens.refill(allowance.tokens_per_minute, now)
        account.line_tokens.refill(allowance.tokens_per_minute, now)
        return account

    def _check(self, account: _Account, key: Key) -> None:
        allowance = key.allowance
        headers = _headers(account)
        num_running = account.num_running + self._unattended[key.name]
        if allowance.max_concurrent and num_running >= allowance.max_concurrent:
            raise TooManyRequests(
                f"Rate limit reached: {num_running} requests of this key are running, "
                f"and at most {allowance.max_concurrent} may run at once.",
                AT_ONCE_RETRY_SECONDS,
                headers,
            )
        if (limit := allowance.requests_per_minute) and account.requests.level < 1:
            wait = account.requests.seconds_to(1, limit)
            raise TooManyRequests(_reached("requests", limit, wait), wait, headers)
        if (limit := allowance.tokens_per_minute) and account.tokens.level < 1:
            wait = account.tokens.seconds_to(1, limit)
            raise TooManyTokens(_reached("tokens", limit, wait), wait, headers)


def _reached(what: str, limit: int, wait: float) -> str:
    return (
        f"Rate limit reached on {what} per minute: limit {limit}. "
        f"Please try again in {duration(wait)}."
    )


def _headers(account: _Account) -> dict[str, str]:
    """OpenAI's rate limit headers, for the limits that are set."""
    headers: dict[str, str] = {}
    limits = (
        ("requests", account.allowance.requests_per_minute, account.requests),
        ("tokens", account.allowance.tokens_per_minute, account.tokens),
    )
    for what, limit, bucket in limits:
        if limit:
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, int(bucket.level)))
            headers[f"x-ratelimit-reset-{what}"] = duration(bucket.seconds_to(limit, limit))
    return headers


def duration(seconds: float) -> str:
    """A duration in the form of OpenAI's headers: `17ms`, `1.5s`, `6m0s`."""
    milliseconds = ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
