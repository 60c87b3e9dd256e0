"""What a server inherits from the one that it succeeds: the listening socket and a channel.

This is read before anything else is imported, so that no worker process inherits the descriptors.
"""

import json
import os
import socket
from contextlib import suppress
from typing import NamedTuple, Self

VARIABLE = "PODWAY_INHERITED"  # LISTENER,CHANNEL: descriptors, set by the former server only


class Inherited(NamedTuple):
    """The listening socket of the former server, and a socket for messages to and from it."""

    listener: socket.socket
    channel: socket.socket

    @classmethod
    def from_environment(cls) -> Self | None:
        """What this process has inherited; None if it succeeds no other server."""
        descriptors = os.environ.pop(VARIABLE, None)
        if descriptors is None:
            return None
        listener, channel = (socket.socket(fileno=int(text)) for text in descriptors.split(","))
        for each in (listener, channel):
            each.set_inheritable(False)
        return cls(listener, channel)

    def report(self, failure: str) -> None:
        """Tell the former server why this one cannot take over."""
        with suppress(OSError):
            self.channel.setblocking(True)
            self.channel.sendall(json.dumps({"failed": failure}).encode() + b"\n")
