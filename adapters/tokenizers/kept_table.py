"""Merge tables kept on disk. Proving that a file's merges can be ranks takes 2 s of CPU for 150,000
tokens; reading the table that it gave takes 0.1 s."""

import hashlib
import logging
from pathlib import Path

import msgspec

from adapters.tokenizers import byte_level
from adapters.tokenizers.byte_level import MergeTable, merge_table
from adapters.tokenizers.definition import TokenizerDefinition
from engine.files import replace_file

logger = logging.getLogger(__name__)

MIN_TOKENS = 10_000  # a smaller table is made as quickly as it is read
_NAME_DIGITS = 24


def kept_merge_table(definition: TokenizerDefinition, folder: Path | None) -> MergeTable:
    """The merge table of this file: from `folder`, or made and kept there, if there is a folder.

    A table that is damaged, or of another version of the code, is made again. Raises
    `NotRepresentable`.
    """
    added = [token.content for token in definition.added]
    if folder is None or len(definition.vocab) < MIN_TOKENS:
        return merge_table(definition.model, definition.vocab, added)
    path = folder / f"{hashlib.sha256(definition.text).hexdigest()[:_NAME_DIGITS]}.ranks"
    if (found := _read(path)) is not None:
        return found
    table = merge_table(definition.model, definition.vocab, added)
    content = msgspec.msgpack.encode(table)
    try:
        replace_file(path, _checksum(content) + content)
    except OSError as error:
        logger.warning("cannot keep the ranks of %s: %s", definition.path, error)
    return table


def _read(path: Path) -> MergeTable | None:
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    size = hashlib.sha256().digest_size
    checksum, content = kept[:size], kept[size:]
    return (
        msgspec.msgpack.decode(content, type=MergeTable) if checksum == _checksum(content) else None
    )


def _checksum(content: bytes) -> bytes:
    """The SHA-256 of a table and of the code that proved it."""
    code = Path(byte_level.__file__).read_bytes()
    return hashlib.sha256(code + content).digest()
