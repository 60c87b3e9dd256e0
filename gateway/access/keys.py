"""API keys: authentication, and the limits of each key. Only SHA-256 digests are kept in memory."""

import base64
import hmac
import logging
from collections.abc import Iterable
from pathlib import Path

from engine.errors import StartupError
from gateway.access.key_file import Key, KeyDefaults, digest_of, key_from_text, read_key_file
from gateway.errors import InvalidApiKey

logger = logging.getLogger(__name__)


class Keys:
    """The API keys. Without any, the server is open: no request needs a key.

    Raises `StartupError` if a key or the key file is invalid.
    """

    def __init__(
        self,
        keys: Iterable[str] = (),
        file: Path | None = None,
        defaults: KeyDefaults | None = None,
        admin_keys: Iterable[str] = (),
    ) -> None:
        """`keys` and `admin_keys` are written as `KEY` or `NAME=KEY`."""
        self._given = tuple(keys)
        self._admins = tuple(admin_keys)
        self._file = file
        self._defaults = defaults or KeyDefaults()
        self._open = Key("", (), self._defaults.allowance)
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

    def named(self, name: str) -> Key | None:
        """The key of this name, for stored requests; one without limits on a server that no longer
        has keys; None if it was revoked."""
        if self.is_open:
            return Key(name, (), cache_domain=name) if name else self._open
        return next((key for key in self._keys if key.name == name), None)

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
        found = [key for each in sent for key in self._matches(digest_of(each))]
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
        defaults = self._defaults
        keys = [key_from_text(text, defaults) for text in self._given]
        keys += [key_from_text(text, defaults, is_admin=True) for text in self._admins]
        if self._file is not None:
            in_file = read_key_file(self._file, defaults)
            if not in_file:
                raise StartupError(
                    f"the key file {self._file} has no keys; without keys the server would be open"
                )
            keys += in_file
        _check_distinct(keys)
        return tuple(keys)


def is_basic(authorization: str | None) -> bool:
    """Whether a browser sent the key, which it may do for any page."""
    return (authorization or "").partition(" ")[0].lower() == "basic"


def _authorized(authorization: str | None) -> str:
    scheme, _, rest = (authorization or "").partition(" ")
    if scheme.lower() == "bearer":
        return rest.strip()
    if not is_basic(authorization):
        return ""
    try:
        return base64.b64decode(rest, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


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
