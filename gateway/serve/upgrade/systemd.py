"""Messages to systemd, for units with `Type=notify`."""

import os
import socket
from contextlib import suppress

VARIABLE = "NOTIFY_SOCKET"


def is_notified() -> bool:
    """Whether systemd follows this process by its messages."""
    return VARIABLE in os.environ


def notify(*lines: str) -> None:
    """Tell systemd the state of the unit; nothing happens without it."""
    address = os.environ.get(VARIABLE)
    if address is None:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect("\0" + address[1:] if address.startswith("@") else address)
        sender.sendall("\n".join(lines).encode())
