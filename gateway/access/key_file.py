"""Keys and their rights, from text and from the key file: TOML, with a table per key.

    [alice]                       # the name: in logs, as tenant of shares, files and batches
    key = "sk-…"                  # or a list, while one key replaces another; or key_sha256
    requests_per_minute = 60
    tokens_per_minute = 100_000
    max_concurrent = 8
    weight = 2.0                  # share under the policy `fair`
    priority = 0                  # lowest priority value its requests may have (lower runs first)
    itl_goal_ms = 50              # ITL goal of its requests, instead of --itl-goal; 0: none
    prefix_isolation = true       # share no cached prefixes with other keys
    admin = true                  # may use /admin

Limits that a table leaves out come from the settings; 0 is no limit.
"""

import hashlib
import re
import tomllib
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec

from engine.errors import StartupError

NAME_DIGITS = 16  # hex digits of the digest that name a key without a name
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64})=(?P<key>[^=].*)", re.DOTALL)
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of a key; 0 is no limit.

    `priority` is the lowest priority value that its requests may have; None: any. `itl_goal` is in
    seconds; None: the server's.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    weight: float = 1.0
    priority: int | None = None
    itl_goal: float | None = None


@dataclass(frozen=True, slots=True)
class KeyDefaults:
    """What applies to a key unless the key file sets it. `isolates_prefixes`: each key is a cache
    domain of its own."""

    allowance: Allowance = field(default_factory=Allowance)
    isolates_prefixes: bool = True


@dataclass(frozen=True, slots=True)
class Key:
    """A named key and its limits. On a server without keys, `name` is "" for all requests.

    `cache_domain`: keys with the same one share cached prefixes; None: all of the server does.
    `is_admin`: may use `/admin` and cancel requests of other keys.
    """

    name: str
    digests: tuple[bytes, ...]
    allowance: Allowance = field(default_factory=Allowance)
    cache_domain: str | None = None
    is_admin: bool = False


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """One table of the key file."""

    key: str | list[str] = []
    key_sha256: str | list[str] = []
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    priority: int | None = None
    itl_goal_ms: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    prefix_isolation: bool | None = None
    admin: bool = False


def digest_of(key: str) -> bytes:
    """The SHA-256 digest of a key's text."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def key_from_text(text: str, defaults: KeyDefaults, *, is_admin: bool = False) -> Key:
    """The key of `NAME=KEY`, or of a bare key, which is named after its digest."""
    named = _NAMED.fullmatch(text)
    digest = digest_of(named["key"] if named else text)
    name = named["name"] if named else digest.hex()[:NAME_DIGITS]
    domain = _domain(name, isolates=defaults.isolates_prefixes)
    return Key(name, (digest,), defaults.allowance, domain, is_admin)


def _domain(name: str, *, isolates: bool) -> str:
    """The cache domain of a key; keys that are not isolated share the domain ""."""
    return name if isolates else ""


def read_key_file(path: Path, defaults: KeyDefaults) -> list[Key]:
    """The keys of the file. Raises `StartupError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(f"cannot read the key file {path}: {reason}") from None
    return keys_of(text, path, defaults)


def keys_of(text: str, path: Path, defaults: KeyDefaults) -> list[Key]:
    """The keys of a key file's text. Raises `StartupError`, which names the file and the table."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the key file {path} is not TOML: {error}") from None
    return [_from_table(path, name, table, defaults) for name, table in tables.items()]


def _from_table(path: Path, name: str, values: object, defaults: KeyDefaults) -> Key:
    try:
        table = msgspec.convert(values, _Table)
    except msgspec.ValidationError as error:
        raise StartupError(f"the key file {path}: [{name}] {error}") from None
    hashes = _as_list(table.key_sha256)
    if not all(map(_SHA256.fullmatch, hashes)):
        raise StartupError(f"the key file {path}: [{name}] key_sha256 must be 64 hex digits")
    texts = _as_list(table.key)
    if not name or not (texts or hashes) or not all(texts):
        raise StartupError(f"the key file {path}: [{name}] needs a key that is not empty")
    if any(text != text.strip() for text in texts):
        raise StartupError(
            f"the key file {path}: [{name}] key must not begin or end with white space, which "
            "headers cannot have"
        )
    digests = (*map(digest_of, texts), *map(bytes.fromhex, hashes))

    def limit(own: int | None, general: int) -> int:
        return general if own is None else own

    default = defaults.allowance
    allowance = Allowance(
        requests_per_minute=limit(table.requests_per_minute, default.requests_per_minute),
        tokens_per_minute=limit(table.tokens_per_minute, default.tokens_per_minute),
        max_concurrent=limit(table.max_concurrent, default.max_concurrent),
        weight=table.weight,
        priority=table.priority,
        itl_goal=None if table.itl_goal_ms is None else table.itl_goal_ms / 1e3 or inf,
    )
    isolation = table.prefix_isolation
    isolates = defaults.isolates_prefixes if isolation is None else isolation
    return Key(name, digests, allowance, _domain(name, isolates=isolates), table.admin)


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
