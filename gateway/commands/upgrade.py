"""`podway upgrade`: replaces a running server without losing a request."""

import sys
from pathlib import Path

from engine.errors import StartupError
from gateway.serve.upgrade.channel import RunningServer, request_upgrade, running_servers
from gateway.settings.flags import Parser


def parser() -> Parser:
    """The flags of `podway upgrade`."""
    parser = Parser(
        "podway upgrade",
        usage="podway upgrade [--pid PID | --port PORT] [-- FLAGS]",
        description="Start a new server beside the running one, with the code that is installed "
        "now. When it is ready it takes over; the old one finishes its requests and ends. If the "
        "new one does not get ready, nothing changes, and the reason is printed.",
        epilog="Arguments after -- replace those of podway serve. SIGUSR2 to the server is an "
        "upgrade with the same arguments.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--pid", type=int, metavar="PID", help="the server's process, or the one that started it"
    )
    which.add_argument(
        "--port", type=int, metavar="PORT", help="the server's port; needed if several run"
    )
    return parser


def main(argv: list[str]) -> int:
    """Upgrade a server and wait until the new one serves. Raises `StartupError`."""
    own, separator, arguments = _split(argv)
    args = parser().parse_args(own)
    server = chosen(running_servers(), args.pid, args.port)
    pid = request_upgrade(server, arguments if separator else None)
    sys.stdout.write(f"the server {pid} has taken over from {server.pid}\n")
    return 0


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    """The arguments before and after `--`, and whether there is one."""
    if "--" not in argv:
        return argv, False, []
    at = argv.index("--")
    return argv[:at], True, argv[at + 1 :]


def chosen(servers: list[RunningServer], pid: int | None, port: int | None) -> RunningServer:
    """The server that is meant. Raises `StartupError` if there is none, or more than one."""
    if pid is not None:
        servers = [each for each in servers if each.pid == pid] or [
            each for each in servers if pid in ancestors(each.pid)
        ]
    elif port is not None:
        servers = [each for each in servers if each.port == port]
    if not servers:
        raise StartupError("no such server of this user runs here: see podway serve")
    if len(servers) > 1:
        shown = ", ".join(f"{each.pid} (port {each.port})" for each in servers)
        raise StartupError(f"several servers run: choose one with --pid or --port: {shown}")
    return servers[0]


def ancestors(pid: int) -> list[int]:
    """The process ids of its parent, that one's parent, and so on."""
    found: list[int] = []
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found
