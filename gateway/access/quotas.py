"""Quotas: requests and tokens per minute and requests at once, for each API key.

A bucket refills steadily, its limit in a minute, and holds at most its limit. A request takes
one from the requests as it enters. Tokens are paid as they are known: the prompt when the engine
accepts it, the answer when it ends; the bucket may go into debt, and a key in debt waits until
it is paid. So no request is refused for what it might have used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING

from engine.events import NullObserver
from gateway.access.keys import Allowance, Key
from gateway.errors import TooManyAtOnce, TooManyRequests, TooManyTokens

if TYPE_CHECKING:
    from engine.request import Request

AT_ONCE_RETRY_SECONDS = 1.0  # nobody knows when one of the others will end


@dataclass(slots=True)
class _Bucket:
    """`level` as of `at`, in seconds of the caller's clock; below zero it is a debt."""

    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        self.level = min(per_minute, self.level + (now - self.at) * per_minute / 60)
        self.at = now

    def seconds_to(self, level: float, per_minute: int) -> float:
        return max(0.0, (level - self.level) * 60 / per_minute)


@dataclass(slots=True, eq=False)
class _Account:
    """What a key has left. `allowance` is the one it last entered with."""

    allowance: Allowance
    requests: _Bucket
    tokens: _Bucket
    num_running: int = 0


@dataclass(slots=True)
class Quotas(NullObserver):
    """An observer of the engine, which tells it of the tokens, and the book at the door."""

    _accounts: dict[str, _Account] = field(default_factory=dict)

    def enter(self, key: Key, now: float) -> Mapping[str, str]:
        """Count a request in; what its response says about the limits.

        Raises `TooManyAtOnce`, `TooManyRequests` or `TooManyTokens`. Whoever entered must leave.
        """
        allowance = key.allowance
        account = self._account(key, now)
        self._check(account, key)
        if allowance.requests_per_minute:
            account.requests.level -= 1
        account.num_running += 1
        return _headers(account)

    def leave(self, key: Key) -> None:
        """The request is over."""
        self._accounts[key.name].num_running -= 1

    def arrived(self, request: "Request", now: float) -> None:
        """The prompt is known."""
        self._pay(request, request.prompt_len, now)

    def ended(self, request: "Request", now: float) -> None:
        """The answer is known."""
        self._pay(request, request.produced, now)

    def _pay(self, request: "Request", num_tokens: int, now: float) -> None:
        """Only for what somebody waits for: lines of batches take from nobody."""
        account = self._accounts.get(request.spec.tenant)
        if account is None or request.spec.is_background:
            return
        if account.allowance.tokens_per_minute:
            account.tokens.refill(account.allowance.tokens_per_minute, now)
            account.tokens.level -= num_tokens

    def _account(self, key: Key, now: float) -> _Account:
        allowance = key.allowance
        account = self._accounts.get(key.name)
        if account is None:
            full = (_Bucket(allowance.requests_per_minute, now), _Bucket(0.0, now))
            account = self._accounts[key.name] = _Account(allowance, *full)
            account.tokens.level = allowance.tokens_per_minute
        account.allowance = allowance
        account.requests.refill(allowance.requests_per_minute, now)
        account.tokens.refill(allowance.tokens_per_minute, now)
        return account

    def _check(self, account: _Account, key: Key) -> None:
        allowance = key.allowance
        headers = _headers(account)
        if allowance.max_concurrent and account.num_running >= allowance.max_concurrent:
            raise TooManyAtOnce(
                f"Rate limit reached: {account.num_running} requests of this key are running, "
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
    """OpenAI's headers for the limits that there are."""
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
    """As OpenAI spells it: `17ms`, `1.5s`, `6m0s`."""
    milliseconds = ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
