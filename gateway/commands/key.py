"""`podway key new NAME`: makes an API key and its entry in the key file of `podway serve`."""

import json
import os
import re
import secrets
import sys
from hashlib import sha256
from pathlib import Path

from engine.errors import StartupError
from gateway.access.key_file import KeyDefaults, keys_of, read_key_file
from gateway.settings.flags import Parser, above_zero, natural

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY_BYTES = 32
FIELDS = (
    "requests_per_minute", "tokens_per_minute", "max_concurrent", "weight", "priority", "admin"
)  # fmt: skip


def parser() -> Parser:
    """The flags of `podway key`."""
    parser = Parser(
        "podway key",
        usage="podway key new NAME [flags]",
        description="Make an API key. The file stores only its SHA-256 digest, so the key itself "
        "is shown once.",
        epilog="A running server reads its --api-key-file again on SIGHUP.",
    )
    parser.add_argument("action", choices=("new",), help="new: make a key")
    parser.add_argument(
        "name", metavar="NAME", help="name of the key, for example the application that uses it"
    )
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="append the entry to this key file; else print it"
    )
    add = parser.add_argument_group("limits of the key (default: those of the server)").add_argument
    add("--requests-per-minute", type=natural, metavar="N", help="0: no limit")
    add("--tokens-per-minute", type=natural, metavar="N", help="prompt and output tokens")
    add("--max-concurrent", type=natural, metavar="N", help="requests at the same time")
    add("--weight", type=above_zero, metavar="W", help="share under --policy fair (default 1)")
    add("--admin", action="store_true", default=None, help="may use /admin")
    add("--priority", type=int, metavar="P", help="lowest priority value of its requests")
    return parser


def main(argv: list[str]) -> int:
    """Print the key, and add or print its entry. Raises `StartupError`."""
    args = parser().parse_args(argv)
    if not _NAME.fullmatch(args.name):
        raise StartupError(
            f"NAME must be 1 to 64 letters, digits, '_', '.' and '-', not {args.name!r}"
        )
    key = f"sk-podway-{secrets.token_urlsafe(_KEY_BYTES)}"
    limits = {name: getattr(args, name) for name in FIELDS}
    text = entry(args.name, key, limits)
    keys_of(text, args.file or Path("-"), KeyDefaults())  # the server's bounds of the limits
    if args.file is None:
        sys.stdout.write(text)
        sys.stderr.write(f"the key of {args.name}, shown only now: {key}\n")
        return 0
    append(args.file, args.name, text)
    sys.stdout.write(key + "\n")
    return 0


def entry(name: str, key: str, limits: dict[str, float | None]) -> str:
    """The key's table in the key file; limits that are None are left to the server."""
    lines = [f'["{name}"]', f'key_sha256 = "{sha256(key.encode()).hexdigest()}"']
    given = {name: value for name, value in limits.items() if value is not None}
    lines += [f"{name} = {json.dumps(value)}" for name, value in given.items()]
    return "\n".join(lines) + "\n"


def append(path: Path, name: str, text: str) -> None:
    """Add an entry to the key file, or create it with mode 0600.

    Raises `StartupError` if the file is not a valid key file, has the name, or cannot be written.
    """
    if path.exists():
        if name in [key.name for key in read_key_file(path, KeyDefaults())]:
            raise StartupError(f"the key file {path} already has a key named {name!r}")
        text = "\n" + text
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StartupError(f"cannot write the key file {path}: {error.strerror}") from error
