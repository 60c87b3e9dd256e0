"""The request log: one line, and the counts of `/metrics`, for each request that ended or was
rejected.

A `RequestRecord` is opened when a request's headers have arrived. Routes and error responses fill
in what they know; as an observer of the engine, the log adds tokens and times of the engine
requests with the record's id and key. The line is written when the response and the last of these
have ended. Lines of batches have records, too (method BATCH). Probes that succeed are logged at
level DEBUG.
"""

import json
import logging
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.iteration import Observer
from engine.ports import Clock
from engine.request import Request

logger = logging.getLogger(__name__)

METHODS = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS", "PUT", "PATCH", "BATCH"})
OTHER = "other"  # the label of paths and methods that no route has
CLIENT_CLOSED_REQUEST = 499  # nginx's status of a request whose client left before a response
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_PLAIN = re.compile(r"[!#-<>-~]+")  # printable ASCII without space, quote and equals sign


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is known of a request. Times are in seconds of the service's clock.

    `route` is the path's template; `path` is as the client sent it. Tokens are sums over the
    engine requests, one per choice. `reason` is an error code, or why generation ended.
    """

    request_id: str
    arrived_at: float
    method: str = "-"
    path: str = "-"
    client: str = "-"
    route: str = OTHER
    key: str = ""
    status: int = 0
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_at: float | None = None
    num_running: int = 0  # engine requests that have not ended
    is_starting: bool = False  # more engine requests will be added
    is_over: bool = False  # the response has ended
    is_probe: bool = False
    trace_id: str = ""  # from the header traceparent (W3C Trace Context)

    def fields(self, now: float) -> dict[str, Any]:
        """The line's fields; durations in seconds, None where there was no token."""
        ttft = None if self.first_token_at is None else self.first_token_at - self.arrived_at
        trace = {"trace_id": self.trace_id} if self.trace_id else {}
        return {
            "id": self.request_id,
            "key": self.key,
            "client": self.client,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "reason": self.reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft": None if ttft is None else round(ttft, 6),
            "jct": round(now - self.arrived_at, 6),
            **trace,
        }


@dataclass(slots=True)
class RequestLog(Observer):
    """Writes the lines, and counts requests by route, method and status, and by key."""

    clock: Clock
    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    key_requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    key_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)
    _running: dict[tuple[str, str], RequestRecord] = field(default_factory=dict)

    def watch(self, record: RequestRecord) -> None:
        """Let engine requests with its id and key belong to this record from now on, unless they
        belong to another one with the same id (clients may choose it)."""
        self._running.setdefault((record.key, record.request_id), record)

    def close(self, record: RequestRecord) -> None:
        """The response has ended, or the client has disconnected before it began."""
        record.is_over = True
        if not record.status:
            record.status = CLIENT_CLOSED_REQUEST
            record.reason = record.reason or "client_gone"
        if not record.num_running:
            self._write(record)

    def arrived(self, request: Request, now: float) -> None:
        """The engine accepted a request."""
        if (record := self._of(request)) is not None:
            record.num_running += 1

    def ended(self, request: Request, now: float) -> None:
        """Add its tokens and its reason."""
        if (record := self._of(request)) is None:
            return
        record.num_running -= 1
        record.prompt_tokens += request.spec.own_len
        record.cached_tokens += request.own_cached
        record.output_tokens += request.produced
        first = request.times.first_token_at
        if first is not None:
            record.first_token_at = min(first, record.first_token_at or first)
        finish, abort = request.finish, request.abort
        record.reason = record.reason or (finish.value if finish else abort.value if abort else "")
        if record.is_over and not record.num_running:
            self._write(record)

    def _of(self, request: Request) -> RequestRecord | None:
        return self._running.get((request.spec.tenant, request.spec.label))

    def _write(self, record: RequestRecord) -> None:
        place = (record.key, record.request_id)
        if self._running.get(place) is record:
            del self._running[place]
        method = record.method if record.method in METHODS else OTHER
        self.requests[record.route, method, record.status] += 1
        self.key_requests[record.key, record.status] += 1
        self.key_tokens[record.key, "prompt"] += record.prompt_tokens
        self.key_tokens[record.key, "output"] += record.output_tokens
        is_quiet = record.is_probe and record.status < 400  # the first error
        level = logging.DEBUG if is_quiet else logging.INFO
        if logger.isEnabledFor(level):
            fields = record.fields(self.clock())
            logger.log(level, "%s", as_text(fields), extra={"fields": fields})


def as_text(fields: dict[str, Any]) -> str:
    """`name=value …`; a value with other than plain characters is a JSON string, so a client
    cannot add fields or lines."""
    return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def trace_id_of(traceparent: str | None) -> str:
    """The trace id of a `traceparent` header; "" without a valid one."""
    match = _TRACEPARENT.fullmatch(traceparent or "")
    return "" if match is None or match[1] == "0" * 32 else match[1]
