"""A typed view of `tokenizer.json`, which every tokenizer here is loaded from.

A file with another structure is rejected with an error that names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from adapters.gguf import is_gguf, read_document
from engine.errors import StartupError

DOCUMENT = "tokenizer.json"

Section = Mapping[str, Any]


class NotRepresentable(Exception):
    """A library cannot give exactly the ids that the file defines; the next one is tried."""


class FileState(NamedTuple):
    """What changes if a file is written or replaced."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """Raises `OSError`."""
        stat = path.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is split off the text before normalization and pre-tokenization."""

    id: int
    content: str
    is_special: bool
    is_normalized: bool
    depends_on_context: bool  # lstrip, rstrip or single_word: the match depends on its neighbours


@dataclass(frozen=True, slots=True)
class MergeTable:
    """The rank of each token's bytes, for tiktoken.

    `ids[rank]` is the token id; `ids` is None if the ranks are the ids, which requires the ids to
    be in merge order.
    """

    ranks: dict[bytes, int]
    ids: list[int] | None


@dataclass(frozen=True, slots=True)
class TokenizerDefinition:
    """One `tokenizer.json`. Sections that are null in the file are None."""

    path: Path
    text: bytes  # the whole document; b"" with `merges`
    model: Section
    vocab: Mapping[str, int]
    added: tuple[AddedToken, ...]
    normalizer: Section | None
    pre_tokenizer: Section | None
    post_processor: Section | None
    decoder: Section | None
    state: FileState
    merges: MergeTable | None = None  # if it is known; `model` is without its merges then

    @property
    def special_tokens(self) -> dict[str, int]:
        """The special tokens by text; they are not part of decoded output."""
        return {token.content: token.id for token in self.added if token.is_special}

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @property
    def token_ids(self) -> dict[str, int]:
        """Every token and its id, added tokens included."""
        return {**self.vocab, **{token.content: token.id for token in self.added}}

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.token_ids.values(), default=-1) + 1


def file_of(directory: Path) -> Path:
    """The file that a checkpoint's tokenizer is read from."""
    return directory if is_gguf(directory) and directory.is_file() else directory / DOCUMENT


def read_definition(directory: Path) -> TokenizerDefinition:
    """Read `tokenizer.json` in `directory`. Raises `StartupError` that names the file."""
    path = file_of(directory)
    try:
        state = FileState.of(path)  # before it is read, so that it is of no later state
        if path == directory:
            data = read_document(directory, DOCUMENT)
            return _definition(path, state, orjson.dumps(data), data)
        text = path.read_bytes()
        data = orjson.loads(text)
    except FileNotFoundError as error:
        raise StartupError(f"{directory} has no {DOCUMENT}") from error
    except (OSError, orjson.JSONDecodeError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    try:
        return _definition(path, state, text, data)
    except (KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} is not a tokenizer.json: {error!r}") from error


def _definition(path: Path, state: FileState, text: bytes, data: Section) -> TokenizerDefinition:
    model: Section = data["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [[piece, score], …], the id is the index
        vocab = {piece: index for index, (piece, _) in enumerate(vocab)}
    return TokenizerDefinition(
        path=path,
        text=text,
        model=model,
        vocab=vocab,
        added=tuple(_added(token) for token in data.get("added_tokens") or ()),
        normalizer=data.get("normalizer"),
        pre_tokenizer=data.get("pre_tokenizer"),
        post_processor=data.get("post_processor"),
        decoder=data.get("decoder"),
        state=state,
    )


def _added(token: Section) -> AddedToken:
    return AddedToken(
        id=token["id"],
        content=token["content"],
        is_special=bool(token.get("special")),
        is_normalized=bool(token.get("normalized")),
        depends_on_context=any(token.get(name) for name in ("lstrip", "rstrip", "single_word")),
    )
