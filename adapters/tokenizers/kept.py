"""Tokenizers on disk in the form that the libraries need.

Reading a tokenizer.json of 150,000 tokens and proving that its merges can be tiktoken's ranks takes
2 s of CPU, and the JSON parser holds the interpreter's lock for 0.1 s; making one from the metadata
of a GGUF file takes another second. What came of it is read in a tenth of that, in pieces between
which other threads run.
"""

import hashlib
import logging
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from adapters.tokenizers.definition import FileState, MergeTable, TokenizerDefinition, file_of
from engine.files import replace_file, source_digest

logger = logging.getLogger(__name__)

MIN_TOKENS = 10_000  # a smaller tokenizer is made as quickly as it is read
PIECE = 4_096  # tokens that are decoded at a time, in about a millisecond
_NAME_DIGITS = 24
_LENGTH = struct.Struct("<I")
_CHECKSUM_BYTES = hashlib.sha256().digest_size

T = TypeVar("T")


class _Head(msgspec.Struct):
    """The first piece: what the others belong to."""

    code: str  # the digest of the code that made it
    num_tokens: int
    num_ranks: int
    has_ids: bool
    definition: TokenizerDefinition  # without its vocabulary and merges


def read_kept(directory: Path, cache: Path) -> TokenizerDefinition | None:
    """The kept tokenizer of this checkpoint, with its merge table if tiktoken represents it. None
    if there is none, or if it is damaged, of another state of the file, or of another version of
    the code."""
    found = _open(directory, cache)
    if found is None:
        return None
    head, pieces = found
    vocab = _joined(islice(pieces, _num_pieces(head.num_tokens)), str)
    ranks = _joined(islice(pieces, _num_pieces(head.num_ranks)), bytes)
    ids = [each for piece in pieces for each in msgspec.msgpack.decode(piece, type=list[int])]
    merges = MergeTable(ranks, ids if head.has_ids else None) if ranks else None
    return replace(head.definition, vocab=vocab, merges=merges)


def is_kept(directory: Path, cache: Path) -> bool:
    """Whether `read_kept` would find the tokenizer of this checkpoint."""
    return _open(directory, cache) is not None


def keep(definition: TokenizerDefinition, merges: MergeTable | None, cache: Path) -> None:
    """Keep a large tokenizer for later starts: with its merge table, else with its text. A failure
    is logged, not raised."""
    if len(definition.vocab) < MIN_TOKENS:
        return
    table = merges or MergeTable({}, None)
    text = definition.text if merges is None else b""
    model = {k: v for k, v in definition.model.items() if k not in ("vocab", "merges")}
    try:
        head = _Head(
            code=_code(),
            num_tokens=len(definition.vocab),
            num_ranks=len(table.ranks),
            has_ids=table.ids is not None,
            definition=replace(definition, text=text, model=model, vocab={}),
        )
        pieces = [msgspec.msgpack.encode(head, enc_hook=str)]
        pieces += (msgspec.msgpack.encode(dict(part)) for part in _parts(definition.vocab.items()))
        pieces += (msgspec.msgpack.encode(dict(part)) for part in _parts(table.ranks.items()))
        pieces += (msgspec.msgpack.encode(part) for part in _parts(table.ids or ()))
        content = b"".join(_LENGTH.pack(len(piece)) + piece for piece in pieces)
        path = _path(definition.path, cache)
        replace_file(path, hashlib.sha256(content).digest() + content)
    except OSError as error:
        logger.warning("cannot keep the tokenizer of %s: %s", definition.path, error)


def _open(directory: Path, cache: Path) -> tuple[_Head, Iterator[memoryview]] | None:
    """The head and the other pieces of a file that can be trusted."""
    source = file_of(directory)
    try:
        kept, state = _path(source, cache).read_bytes(), FileState.of(source)
    except OSError:
        return None
    content = memoryview(kept)[_CHECKSUM_BYTES:]
    if kept[:_CHECKSUM_BYTES] != hashlib.sha256(content).digest():
        return None
    pieces = _pieces(content)
    head = msgspec.msgpack.decode(next(pieces), type=_Head, dec_hook=_from_text)
    is_valid = head.code == _code() and head.definition.state == state
    return (head, pieces) if is_valid else None


def _path(source: Path, cache: Path) -> Path:
    name = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:_NAME_DIGITS]
    return cache / f"{name}.tokenizer"


def _code() -> str:
    here = Path(__file__).parent
    return source_digest(here, here.parent / "gguf")


def _from_text(kind: type, value: Any) -> Any:
    return kind(value)


def _parts(entries: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(entries)
    while part := list(islice(rest, PIECE)):
        yield part


def _num_pieces(num_entries: int) -> int:
    return -(-num_entries // PIECE)


def _pieces(content: memoryview) -> Iterator[memoryview]:
    at = 0
    while at < len(content):
        (size,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + size
        yield content[at - size : at]


def _joined(pieces: Iterable[memoryview], kind: type[T]) -> dict[T, int]:
    entries: dict[T, int] = {}
    for piece in pieces:
        entries.update(msgspec.msgpack.decode(piece, type=dict[kind, int]))  # type: ignore[valid-type]
    return entries
