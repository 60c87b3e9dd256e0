"""The port of the tiers that keep KV outside the process: files on a disk, or a store that several
servers share."""

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, cast
from urllib.parse import urlsplit

from engine.errors import StartupError

if TYPE_CHECKING:
    import numpy as np

    Bytes: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
else:
    Bytes = object  # the server, which reads no contents, does without numpy

STORES = "adapters.cluster:KV_STORES"
MAX_NAMES = 1 << 16  # contents of a shared store that the scheduler knows of


class KVStore(Protocol):
    """Keeps contents by name. A content is given back only if it is whole and has that name.

    No method raises because the store fails: what cannot be written or read is not there.
    """

    @property
    def num_slots(self) -> int:
        """The slots are numbered below this; a shared store does not use their numbers."""

    def write(self, slot: int, name: bytes, content: Bytes) -> None:
        """Queue a content, and return at once. It is dropped if the store does not keep up."""

    def read(self, slots: Sequence[int], names: Sequence[bytes]) -> Sequence[Bytes | None]:
        """The contents, None for one that is not there; returns within a bounded time."""

    def wait(self) -> None:
        """Wait until what is queued is written or given up."""

    def close(self) -> None:
        """End the threads and close the connection or the files."""


class SharedStore(KVStore, Protocol):
    """A store that other servers write to, too."""

    @classmethod
    def open(cls, url: str, keys: str, *, lends_memory: bool) -> Self:
        """A client of the store at `url`. Servers with the same `keys` share contents. With
        `lends_memory` the store may use memory of this process, as much as the URL says. Raises
        `StartupError` for a URL that is not valid or a package that is missing, not for a store
        that does not answer."""

    def exists(self, names: Sequence[bytes]) -> Sequence[bool] | None:
        """The contents that the store has; None if it does not answer. Bounded like `read`."""


def open_store(url: str, keys: str, *, lends_memory: bool) -> SharedStore:
    """The store that `--kv-store` names. Raises `StartupError`."""
    scheme, table = urlsplit(url).scheme, cast(Mapping[str, str], _load(STORES))
    if scheme not in table:
        raise StartupError(
            f"--kv-store {url}: {scheme!r} is not supported; known: {', '.join(table)}"
        )
    return cast(type[SharedStore], _load(table[scheme])).open(url, keys, lends_memory=lends_memory)


def _load(path: str) -> object:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)
