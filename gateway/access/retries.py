"""Tries: what happens when a request is sent again while its first try still runs.

Clients retry after a timeout, and a proxy between may keep the first connection open: then both
would be computed. So the newer try supersedes the older: the app sees the older one's client
leave, which frees its KV within an iteration, and the prompt is found in the prefix cache by the
newer. A try is known to be the same request by

- its `idempotency-key`, for the same API key and path. With another body it is refused;
- or `x-stainless-retry-count` (official clients): the same body from the same address with a
  lower count. If several such run, nobody knows which was given up, and all are left alone.
"""

import asyncio
import hashlib
from typing import TYPE_CHECKING, Self

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope

MAX_KEY_CHARS = 255
Identity = tuple[str, ...]


class Retries:
    """The tries that run now, by who they are."""

    def __init__(self) -> None:
        self._running: dict[Identity, list[Attempt]] = {}

    def begin(self, tenant: str, scope: "Scope", receive: "Receive") -> "Attempt":
        """A try that is known as soon as its body has been read, until its `with` ends."""
        return Attempt(self, tenant, scope, receive)

    def join(self, attempt: "Attempt") -> None:
        """Supersede the earlier tries of the same request."""
        running = self._running.setdefault(attempt.identity, [])
        earlier = [each for each in running if each.count < attempt.count]
        if attempt.is_keyed:
            if any(each.digest != attempt.digest for each in running):
                raise InvalidRequest(
                    "The header 'idempotency-key' was used for another body, which is still "
                    "being answered.",
                    "idempotency-key",
                )
            earlier = running
        for each in earlier if attempt.is_keyed or len(earlier) == 1 else ():
            each.supersede()
        self._running[attempt.identity] = [*(r for r in running if not r.is_superseded), attempt]

    def leave(self, attempt: "Attempt") -> None:
        """Forget it; one that never joined is not missed."""
        left = [each for each in self._running.get(attempt.identity, ()) if each is not attempt]
        if left:
            self._running[attempt.identity] = left
        else:
            self._running.pop(attempt.identity, None)


class Attempt:
    """One try. `identity` and `digest` are known when `receive` has handed on the whole body."""

    def __init__(self, tries: Retries, tenant: str, scope: "Scope", receive: "Receive") -> None:
        headers = dict(scope["headers"])
        self._idempotency_key = headers.get(b"idempotency-key", b"")[:MAX_KEY_CHARS]
        self.count = _count(headers.get(b"x-stainless-retry-count", b""))
        self.digest = b""
        self.identity: Identity = ()
        self._tries = tries
        self._place = (tenant, scope["method"], scope["path"])
        self._host = (scope.get("client") or ("", 0))[0]
        self._receive = receive
        self._hash = hashlib.blake2b(digest_size=16)
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tries.leave(self)
        self._superseded.cancel()

    @property
    def is_keyed(self) -> bool:
        """Whether its caller named it."""
        return bool(self._idempotency_key)

    @property
    def is_superseded(self) -> bool:
        """Whether a newer try has taken its place."""
        return self._superseded.done() and not self._superseded.cancelled()

    def supersede(self) -> None:
        """From now on its client is gone, as far as the app can tell."""
        if not self._superseded.done():
            self._superseded.set_result(None)

    async def receive(self) -> "Message":
        """What the client sends; raises `InvalidRequest` for a key that means two things."""
        if not self.identity:
            message = await self._receive()
            self._note(message)
            return message
        receiving = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait((receiving, self._superseded), return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if self.is_superseded else receiving.result()
        finally:
            receiving.cancel()

    def _note(self, message: "Message") -> None:
        if message["type"] != "http.request":
            return
        self._hash.update(message.get("body", b""))
        if message.get("more_body", False):
            return
        self.digest = self._hash.digest()
        if self.is_keyed:
            self.identity = (*self._place, "key", self._idempotency_key.hex())
        else:
            self.identity = (*self._place, self._host, self.digest.hex())
        self._tries.join(self)


def _count(header: bytes) -> int:
    return int(header) if header.isdigit() and len(header) < 4 else 0
