"""Retries: a request that is sent again while its first attempt still runs.

Clients retry after a timeout, and a proxy may keep the first connection open: then both would be
computed. A request names itself with the header `idempotency-key`. If one with the same key, API
key, method and path is running, the newer attempt supersedes it: the app sees a disconnect of the
older one, and the newer one takes over what is in flight for it, a stream from its first event on.
The same key with another body is rejected. Requests without the header are never compared: two
equal requests may be two users of one proxy.
"""

import asyncio
import hashlib
import logging
from typing import Protocol, Self

from starlette.types import Message, Receive, Scope

from engine.errors import InvalidRequest
from gateway.access.callers import Caller

logger = logging.getLogger(__name__)
HEADER = b"idempotency-key"
Identity = tuple[str, ...]


class Shared(Protocol):
    """Work behind a response, which attempts at the same request take over from each other."""

    def hold(self) -> None:
        """Another attempt waits for it."""

    def release(self) -> None:
        """An attempt has left; the work ends with the last one."""


class Retries:
    """The attempts that run now, at most one per identity."""

    def __init__(self) -> None:
        self._running: dict[Identity, Attempt] = {}

    def begin(self, scope: Scope, receive: Receive) -> "Attempt | None":
        """An attempt, which is compared with others once its body is received; None without an
        `idempotency-key`."""
        key = dict(scope["headers"]).get(HEADER)
        return Attempt(self, key, scope, receive) if key else None

    def runs(self, tenant: str, scope: Scope) -> bool:
        """Whether an attempt at the same request runs."""
        key = dict(scope["headers"]).get(HEADER)
        return key is not None and _identity(tenant, scope, key) in self._running

    def join(self, attempt: "Attempt") -> None:
        """Supersede the running attempt of the same request. Raises `InvalidRequest` if that one
        has another body."""
        earlier = self._running.get(attempt.identity)
        if earlier is not None:
            if earlier.digest != attempt.digest:
                raise InvalidRequest(
                    "The header 'idempotency-key' belongs to a running request with another body.",
                    "idempotency-key",
                )
            logger.info(
                "%s superseded by %s: same idempotency-key", earlier.request_id, attempt.request_id
            )
            if earlier.shared is not None:
                attempt.share(earlier.shared)
            earlier.supersede()
        self._running[attempt.identity] = attempt

    def leave(self, attempt: "Attempt") -> None:
        """Remove an attempt that has ended, if it joined and was not superseded."""
        if self._running.get(attempt.identity) is attempt:
            del self._running[attempt.identity]


class Attempt:
    """One attempt at a request, a context manager. `digest` (of the body) is set once `receive`
    has returned the whole body."""

    def __init__(self, retries: Retries, key: bytes, scope: Scope, receive: Receive) -> None:
        caller: Caller = scope["podway.caller"]
        self.request_id = caller.request_id
        self.identity = _identity(caller.tenant, scope, key)
        self.digest: bytes | None = None
        self.shared: Shared | None = None  # what this attempt waits for
        self._retries = retries
        self._receive = receive
        self._hash = hashlib.blake2b(digest_size=16)
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._retries.leave(self)
        self._release()
        self._superseded.cancel()

    @property
    def is_superseded(self) -> bool:
        """Whether a newer attempt has replaced it."""
        return self._superseded.done() and not self._superseded.cancelled()

    def supersede(self) -> None:
        """Let `receive` return a disconnect from now on."""
        if not self._superseded.done():
            self._superseded.set_result(None)

    def share(self, shared: Shared) -> None:
        """Wait for work that later attempts can take over."""
        self.shared = shared
        shared.hold()

    async def receive(self) -> Message:
        """The client's next message. Raises `InvalidRequest` (see `Retries.join`)."""
        if self.digest is None:
            message = await self._receive()
            self._note(message)
            return message
        receiving = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((receiving, self._superseded), return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if self.is_superseded else receiving.result()
        finally:
            receiving.cancel()

    def _release(self) -> None:
        if self.shared is not None:
            self.shared.release()

    def _note(self, message: Message) -> None:
        if message["type"] != "http.request":
            return
        self._hash.update(message.get("body", b""))
        if not message.get("more_body", False):
            self.digest = self._hash.digest()
            self._retries.join(self)


def _identity(tenant: str, scope: Scope, key: bytes) -> Identity:
    return (tenant, scope["method"], scope["path"], key.hex())
