"""Incremental decoding: token ids to bytes, with the same text as Hugging Face's decoders.

A table has the bytes of each id; a decoder object adds only what depends on the beginning of the
output. Supported: byte-level; SentencePiece's Replace, ByteFallback, Fuse and Strip; Metaspace.
Invalid UTF-8 is passed on unchanged; Hugging Face's ByteFallback would also replace valid
characters next to it, which a stream has already sent.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from adapters.tokenizers.byte_level import TokenBytes
from adapters.tokenizers.definition import Section, TokenizerDefinition
from engine.errors import StartupError
from gateway.ports import TokenDecoder

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TableDecoder:
    """Each id has the same bytes everywhere; unknown and special ids have none."""

    __slots__ = ("_table",)

    def __init__(self, table: list[bytes]) -> None:
        self._table = table

    def feed(self, token_id: int) -> bytes:
        try:
            return self._table[token_id]
        except IndexError:
            return b""


class StrippingDecoder:
    """Strips up to `count` repetitions of `content` from the beginning of the output."""

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
    """The first visible token has its bytes from `first`, all others from `table`."""

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
    """A factory of decoders, one for each output, and each id's bytes within a text."""

    make: Callable[[], TokenDecoder]
    table: list[bytes]


class DecodesTokens:
    """The part of the `Tokenizer` port that is about single tokens, from a tokenizer.json."""

    def __init__(self, definition: TokenizerDefinition) -> None:
        self._decoders = decoders_of(definition)
        self.vocab_size = definition.vocab_size
        self.special_ids = definition.special_ids
        self.special_tokens = definition.special_tokens
        self._control_texts = {i: text.encode() for text, i in self.special_tokens.items()}

    @property
    def table(self) -> list[bytes]:
        """The bytes of each id within a text."""
        return self._decoders.table

    def decoder(self) -> TokenDecoder:
        """A new decoder, for one output."""
        return self._decoders.make()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of an id within a text; the name of a control token; b"" for an unknown id."""
        control = self._control_texts.get(token_id)
        if control is not None:
            return control
        table = self._decoders.table
        return table[token_id] if token_id < len(table) else b""


def decoders_of(definition: TokenizerDefinition) -> Decoders:
    """The decoders of a tokenizer.json. Raises `StartupError` for an unknown kind."""
    decoder = definition.decoder or {"type": None}
    match decoder:
        case {"type": "ByteLevel"}:
            table = bytes_of_ids(definition)
            return Decoders(lambda: TableDecoder(table), table)
        case {"type": "Metaspace", "replacement": str(mark)}:
            return _metaspace(definition, mark, decoder.get("prepend_scheme", "always"))
        case {"type": "WordPiece", "prefix": str(prefix)}:
            words = bytes_of_ids(definition)
            bare = _table(definition, lambda token: token.removeprefix(prefix).encode())
            return Decoders(lambda: FirstWordDecoder(words, bare), words)
        case {"type": "Sequence", "decoders": [*steps]}:
            return _sentencepiece(definition, steps)
    raise StartupError(f"{definition.path}: decoder {decoder['type']!r} is not supported")


def bytes_of_ids(definition: TokenizerDefinition) -> list[bytes]:
    """The bytes of each id within an output; special ids have none. Raises `StartupError`."""
    decoder = definition.decoder or {"type": None}
    match decoder:
        case {"type": "ByteLevel"}:
            return _table(definition, TokenBytes().loose)
        case {"type": "Metaspace", "replacement": str(mark)}:
            return _table(definition, lambda token: token.replace(mark, " ").encode())
        case {"type": "WordPiece", "prefix": str(prefix)}:
            return _table(definition, lambda token: _word_piece(token, prefix))
        case {"type": "Sequence", "decoders": [*steps]}:
            per_token, _ = _per_token(steps)
            return _table(definition, lambda token: _piece_bytes(definition, per_token, token))
    raise StartupError(f"{definition.path}: decoder {decoder['type']!r} is not supported")


def _word_piece(token: str, prefix: str) -> bytes:
    """A piece inside a word, which has the prefix, or a word with a space before it."""
    inside = token.removeprefix(prefix)
    return (inside if inside != token else f" {token}").encode()


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
    """Decoders for per-token steps followed by Fuse and an optional Strip of the whole output."""
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
    """The leading steps that apply to single tokens, and the others, to the whole output."""
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
