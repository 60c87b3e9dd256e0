"""Ids back to bytes, one at a time, as Hugging Face's decoders join whole answers.

A table of each id's bytes is made once; a decoder adds only what depends on the beginning of the
answer. Known: byte-level; SentencePiece's Replace, ByteFallback, Fuse, Strip; Metaspace.
Broken UTF-8 is passed on as it is; Hugging Face's ByteFallback would replace also the whole
characters beside it, which a stream has already shown.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from adapters.tokenizers.byte_level import TokenBytes
from adapters.tokenizers.definition import Section, TokenizerDefinition
from engine.errors import StartupError

if TYPE_CHECKING:
    from gateway.ports import TokenDecoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TableDecoder:
    """Each id always adds the same bytes; unknown and special ids add none."""

    __slots__ = ("_table",)

    def __init__(self, table: list[bytes]) -> None:
        self._table = table

    def feed(self, token_id: int) -> bytes:
        try:
            return self._table[token_id]
        except IndexError:
            return b""


class StrippingDecoder:
    """Takes up to `count` times `content` from the beginning of the answer."""

    __slots__ = ("_content", "_left", "_table")

    def __init__(self, table: list[bytes], content: bytes, count: int) -> None:
        self._table = table
        self._content = content
        self._left = count

    def feed(self, token_id: int) -> bytes:
        added = self._table[token_id] if token_id < len(self._table) else b""
        while self._left and added:
            if not added.startswith(self._content):
                self._left = 0
                break
            added = added[len(self._content) :]
            self._left -= 1
        return added


class FirstWordDecoder:
    """The first token that is shown adds its bytes of `first`, all others those of `table`."""

    __slots__ = ("_first", "_shown", "_table")

    def __init__(self, table: list[bytes], first: list[bytes]) -> None:
        self._table = table
        self._first = first
        self._shown = False

    def feed(self, token_id: int) -> bytes:
        if token_id >= len(self._table):
            return b""
        added = self._table[token_id]
        if added and not self._shown:
            self._shown = True
            return self._first[token_id]
        return added


class Decoders(NamedTuple):
    """What makes a fresh decoder for one answer, and each id's bytes in the middle of a text."""

    make: "Callable[[], TokenDecoder]"
    table: list[bytes]


def decoders_of(definition: TokenizerDefinition) -> Decoders:
    """The decoders of a file. Raises `StartupError` for an unknown kind."""
    decoder = definition.decoder or {"type": None}
    match decoder:
        case {"type": "ByteLevel"}:
            table = bytes_of_ids(definition)
            return Decoders(lambda: TableDecoder(table), table)
        case {"type": "Metaspace", "replacement": str(mark)}:
            return _metaspace(definition, mark, decoder.get("prepend_scheme", "always"))
        case {"type": "Sequence", "decoders": [*steps]}:
            return _sentencepiece(definition, steps)
    raise StartupError(f"{definition.path}: decoder {decoder['type']!r} is not supported")


def bytes_of_ids(definition: TokenizerDefinition) -> list[bytes]:
    """The bytes that each id adds within an answer, none for special ids; see above."""
    decoder = definition.decoder or {"type": None}
    match decoder:
        case {"type": "ByteLevel"}:
            return _table(definition, TokenBytes().loose)
        case {"type": "Metaspace", "replacement": str(mark)}:
            return _table(definition, lambda token: token.replace(mark, " ").encode())
        case {"type": "Sequence", "decoders": [*steps]}:
            per_token, _ = _per_token(steps)
            return _table(definition, lambda token: _piece_bytes(definition, per_token, token))
    raise StartupError(f"{definition.path}: decoder {decoder['type']!r} is not supported")


def _table(definition: TokenizerDefinition, read: Callable[[str], bytes]) -> list[bytes]:
    table = [b""] * definition.vocab_size
    for token, token_id in definition.token_ids.items():
        table[token_id] = read(token)
    for token_id in definition.special_ids:
        table[token_id] = b""
    return table


def _metaspace(definition: TokenizerDefinition, mark: str, scheme: str) -> Decoders:
    table = bytes_of_ids(definition)
    if scheme == "never":
        return Decoders(lambda: TableDecoder(table), table)
    first = _table(definition, lambda token: token.replace(mark, "").encode())
    return Decoders(lambda: FirstWordDecoder(table, first), table)


def _sentencepiece(definition: TokenizerDefinition, steps: list[Section]) -> Decoders:
    """Per-token steps, then Fuse, then Strip of the whole."""
    table = bytes_of_ids(definition)
    _, rest = _per_token(steps)
    match rest:
        case [{"type": "Fuse"}]:
            return Decoders(lambda: TableDecoder(table), table)
        case [{"type": "Fuse"}, {"type": "Strip", "content": str(content), "stop": 0} as strip]:
            taken, count = content.encode(), int(strip["start"])
            return Decoders(lambda: StrippingDecoder(table, taken, count), table)
    kinds = [step.get("type") for step in steps]
    raise StartupError(f"{definition.path}: decoder {kinds} is not supported")


def _per_token(steps: list[Section]) -> tuple[list[Section], list[Section]]:
    """The steps that look at one token, and those after them that look at the whole answer."""
    end = 0
    while end < len(steps) and steps[end].get("type") in ("Replace", "ByteFallback"):
        end += 1
    return steps[:end], steps[end:]


def _piece_bytes(definition: TokenizerDefinition, steps: list[Section], token: str) -> bytes:
    for step in steps:
        match step:
            case {"type": "ByteFallback"}:
                if match := _BYTE_TOKEN.fullmatch(token):
                    return bytes.fromhex(match[1])
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                token = token.replace(old, new)
            case _:
                raise StartupError(f"{definition.path}: decoder step {step} is not supported")
    return token.encode()
