"""The end of a connection whose client has its response and still sends the request's body.

Closing a socket with unread data resets the connection (RFC 9112, 9.6): the next write of the
client fails, and many clients, Node's among them, report that and never read the response. So what
still arrives is thrown away for a while, unparsed, at a rate that all such connections share. A
client that waits for the connection's end sees it at once, since nothing more is written.
"""

import asyncio
import weakref
from typing import TYPE_CHECKING, NamedTuple

from gateway.serve.arrival import Arrival, SharedRate, Timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

LINGER_SECONDS = 10.0
MAX_LINGER_BYTES = 256 << 20  # one connection may send so much more
BYTES_PER_SECOND = 64 << 20  # all connections together


class CycleTransport(NamedTuple):
    """What uvicorn needs of a transport for one response."""

    write: "Callable[[bytes], None]"
    is_closing: "Callable[[], bool]"
    close: "Callable[[], None]"


class Linger:
    """Whether, and for how long, one connection is still read after its last response."""

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: "FlowControl",
        arrival: Arrival,
        rate: SharedRate,
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._arrival = arrival
        self._rate = rate
        self._left = 0
        self._end = Timer()
        self._rest = Timer()
        self.has_begun = False

    def transport_of(self, cycle: "RequestResponseCycle") -> CycleTransport:
        """The connection's transport, which closes when the client has sent what it has begun."""
        find = weakref.ref(cycle)  # or the two would form a cycle of references

        def close() -> None:
            ended = find()
            has_ended = ended is not None and ended.response_complete
            if has_ended and not self._transport.is_closing() and self._arrival.is_in_body:
                self.begin()
            else:
                self._transport.close()

        return CycleTransport(self._transport.write, self._transport.is_closing, close)

    def begin(self) -> None:
        """Throw away what arrives from here on, and close when the body is over, or after a
        while."""
        if self.has_begun or self._transport.is_closing():
            return
        self.has_begun = True
        self._left = min(self._arrival.num_left, MAX_LINGER_BYTES)
        self._arrival.end()
        self._end.set(LINGER_SECONDS, self._transport.close)
        self.discard(0)
        if self._transport.can_write_eof():  # TLS cannot
            self._transport.write_eof()

    def discard(self, num_bytes: int) -> None:
        """So many bytes have arrived."""
        self._left -= num_bytes
        if self._left <= 0:
            self._transport.close()
            return
        self._flow.pause_reading()
        delay = self._rate.delay(num_bytes, asyncio.get_running_loop().time())
        self._rest.set(delay, self._flow.resume_reading)

    def stop(self) -> None:
        """The connection is lost."""
        self._end.stop()
        self._rest.stop()
        del self._arrival  # it refers to the connection, and a response that is not over to this
