"""Who asks, and how much may be sent. One log line per finished request."""

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.events import NullObserver
from gateway.errors import BodyTooLarge, BodyTooSlow, WrongMediaType
from gateway.schema.dialect import OPENAI, ApiDialect

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from engine.request import Request

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@#-]{1,128}")
OPENAI_VERSION = "2020-10-01"


@dataclass(frozen=True, slots=True)
class Caller:
    """One HTTP request as the log knows it; `arrived_at` is seconds of the service's clock.

    `tenant` is the name of the API key that was shown, "" where none is needed; `weight` its share
    and `urgent` the lowest priority it may ask for. `limits` are headers that tell of its limits.
    `dialect` renders the errors and headers that its API expects.
    """

    request_id: str
    arrived_at: float
    tenant: str = ""
    weight: float = 1.0
    urgent: int | None = None
    limits: Mapping[str, str] = field(default_factory=dict)
    dialect: ApiDialect = OPENAI

    def headers(self, now: float) -> dict[str, str]:
        """What every response carries."""
        return {
            **self.dialect.headers(self.request_id),
            "x-request-id": self.request_id,
            "openai-processing-ms": str(round((now - self.arrived_at) * 1000)),
            "openai-version": OPENAI_VERSION,
            **self.limits,
        }


def sane_request_id(offered: str | None) -> str | None:
    """The caller's own x-request-id if it is short and printable, else None."""
    return offered if offered is not None and _SANE_ID.fullmatch(offered) else None


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How large a body may be, and how long it may take to arrive."""

    max_bytes: int = 16 << 20
    seconds: float = 60.0


async def read_body(http: "HttpRequest", limits: BodyLimits) -> bytes:
    """The whole JSON body, refused as early as it can be seen to be wrong."""
    _check_media_type(http)
    _check_length(http.headers.get("content-length"), limits.max_bytes)
    try:
        async with asyncio.timeout(limits.seconds):
            return await _gather(http, limits.max_bytes)
    except TimeoutError:
        raise BodyTooSlow(limits.seconds) from None


async def _gather(http: "HttpRequest", max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for piece in http.stream():
        size += len(piece)
        if size > max_bytes:
            raise BodyTooLarge(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _check_media_type(http: "HttpRequest") -> None:
    encoding = http.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise WrongMediaType(f"Content-Encoding {encoding!r} is not supported; send plain JSON.")
    media_type = http.headers.get("content-type")
    if media_type is None:
        return
    essence, _, parameters = media_type.partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if essence.strip().lower() != "application/json" or charset not in ("", "utf-8", "utf8"):
        raise WrongMediaType(
            f"Content-Type {media_type[:100]!r} is not supported; send 'application/json'."
        )


def _check_length(announced: str | None, max_bytes: int) -> None:
    if announced is not None and announced.isdecimal() and int(announced[:20]) > max_bytes:
        raise BodyTooLarge(max_bytes)


class RequestLog(NullObserver):
    """An observer that writes the one line of each request that has ended."""

    def ended(self, request: "Request", now: float) -> None:
        """Log it; `reason` is how it finished, or why it was ended."""
        if not logger.isEnabledFor(logging.INFO):
            return
        finish, abort = request.finish, request.abort
        reason = finish.value if finish else abort.value if abort else request.state.value
        logger.info(
            "%s prompt_len=%d produced=%d ttft=%s jct=%s reason=%s",
            request.spec.label or request.request_id,
            request.prompt_len,
            request.produced,
            _since(request, request.first_token_at),
            _since(request, now),
            reason,
        )


def _since(request: "Request", moment: float | None) -> str:
    return "-" if moment is None else f"{moment - request.arrived_at:.3f}"
