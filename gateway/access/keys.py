"""API keys: authentication, and the limits of each key. Only SHA-256 digests are kept in memory.

Keys come from `--api-key` and from `--api-key-file`, a TOML file with a table per key:

    [alice]                       # the name: in logs, as tenant of shares, files and batches
    key = "sk-…"                  # or a list, while one key replaces another; or key_sha256
    requests_per_minute = 60
    tokens_per_minute = 100_000
    max_concurrent = 8
    weight = 2.0                  # share under the policy `fair`
    priority = 0                  # lowest priority value its requests may have (lower runs first)

Limits that a table leaves out come from the settings; 0 is no limit.
"""

import base64
import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from engine.errors import StartupError
from gateway.errors import InvalidApiKey

logger = logging.getLogger(__name__)

NAME_DIGITS = 16  # hex digits of the digest that name a key without a name
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64})=(?P<key>[^=].*)", re.DOTALL)
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

Count = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of a key; 0 is no limit.

    `priority` is the lowest priority value that its requests may have; None: any.
    """

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrent: int = 0
    weight: float = 1.0
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A named key and its limits. On a server without keys, `name` is "" for all requests."""

    name: str
    digests: tuple[bytes, ...]
    allowance: Allowance


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """One table of the key file."""

    key: str | list[str] = []
    key_sha256: str | list[str] = []
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None
    weight: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0
    priority: int | None = None


class Keys:
    """The API keys. Without any, the server is open: no request needs a key.

    Raises `StartupError` if a key or the key file is invalid.
    """

    def __init__(
        self, keys: Iterable[str] = (), file: Path | None = None, default: Allowance | None = None
    ) -> None:
        self._given = tuple(keys)
        self._file = file
        self._default = default or Allowance()
        self._open = Key("", (), self._default)
        self._keys = self._read()

    @property
    def is_open(self) -> bool:
        """Whether no request needs a key."""
        return not self._keys

    def reload(self) -> None:
        """Read the file again; if it is invalid, the old keys stay in use. Both are logged."""
        try:
            self._keys = self._read()
        except StartupError as error:
            logger.error("keeping the old API keys: %s", error)
        else:
            logger.info("reloaded %d API keys", len(self._keys))

    def key_of(self, authorization: str | None, x_api_key: str | None = None) -> Key:
        """The key in either header: `Authorization: Bearer …` or `x-api-key`.

        Browsers send what a person typed as `Basic`; its password is the key.

        Raises `InvalidApiKey`. The duration of the comparison does not depend on the key.
        """
        if not self._keys:
            return self._open
        sent = [key for key in (_authorized(authorization), (x_api_key or "").strip()) if key]
        if not sent:
            raise InvalidApiKey(
                "You didn't provide an API key. Send it as 'Authorization: Bearer YOUR_KEY' or "
                "as 'x-api-key: YOUR_KEY'."
            )
        found = [key for each in sent for key in self._matches(_digest(each))]
        if not found:
            raise InvalidApiKey("Incorrect API key provided.")
        return found[0]

    def _matches(self, sent: bytes) -> list[Key]:
        """The keys with this digest. All are compared, so that the duration is constant."""
        return [
            key
            for key in self._keys
            if any([hmac.compare_digest(sent, digest) for digest in key.digests])  # noqa: C419 # any() of a list: no short circuit
        ]

    def _read(self) -> tuple[Key, ...]:
        keys = [_from_text(text, self._default) for text in self._given]
        if self._file is not None:
            keys += _from_file(self._file, self._default)
        _check_distinct(keys)
        return tuple(keys)


def _authorized(authorization: str | None) -> str:
    scheme, _, rest = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(rest, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _from_text(text: str, allowance: Allowance) -> Key:
    """From `NAME=KEY`, or from a bare key, which is named after its digest."""
    named = _NAMED.fullmatch(text)
    digest = _digest(named["key"] if named else text)
    name = named["name"] if named else digest.hex()[:NAME_DIGITS]
    return Key(name, (digest,), allowance)


def _from_file(path: Path, default: Allowance) -> list[Key]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        found = msgspec.convert(tables, dict[str, _Table])
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(f"cannot read the key file {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the key file {path} is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise StartupError(f"the key file {path}: {error}") from None
    if not found:
        raise StartupError(
            f"the key file {path} has no keys; without keys the server would be open"
        )
    return [_from_table(path, name, table, default) for name, table in found.items()]


def _from_table(path: Path, name: str, table: _Table, default: Allowance) -> Key:
    hashes = list(_as_list(table.key_sha256))
    if wrong := next((each for each in hashes if not _SHA256.fullmatch(each)), None):
        raise StartupError(
            f"the key file {path}: [{name}] key_sha256 must be 64 hex digits, not {wrong[:80]!r}"
        )
    texts = list(_as_list(table.key))
    if not name or not (texts or hashes) or not all(texts):
        raise StartupError(f"the key file {path}: [{name}] needs a key that is not empty")
    digests = (*map(_digest, texts), *map(bytes.fromhex, hashes))

    def limit(own: int | None, general: int) -> int:
        return general if own is None else own

    allowance = Allowance(
        requests_per_minute=limit(table.requests_per_minute, default.requests_per_minute),
        tokens_per_minute=limit(table.tokens_per_minute, default.tokens_per_minute),
        max_concurrent=limit(table.max_concurrent, default.max_concurrent),
        weight=table.weight,
        priority=table.priority,
    )
    return Key(name, digests, allowance)


def _as_list(value: str | list[str]) -> Iterator[str]:
    return iter([value] if isinstance(value, str) else value)


def _check_distinct(keys: list[Key]) -> None:
    """Each name and each key may occur once; otherwise its limits would be ambiguous."""
    names: set[str] = set()
    digests: set[bytes] = set()
    for key in keys:
        if key.name in names:
            raise StartupError(f"two API keys have the name {key.name!r}")
        if digests.intersection(key.digests) or len(set(key.digests)) < len(key.digests):
            raise StartupError(f"the API key of {key.name!r} occurs twice")
        names.add(key.name)
        digests.update(key.digests)
