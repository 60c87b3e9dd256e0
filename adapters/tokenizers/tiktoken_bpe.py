"""Byte-level BPE (GPT-2, Llama 3, Qwen, …) in a tiktoken `Encoding`, with Hugging Face's ids.

A file with features that tiktoken lacks raises `NotRepresentable` at loading. Single texts with
such needs (Unicode normalization, long runs of whitespace) are split by `tokenizers`, which is
slower, and tiktoken encodes their pre-tokens. Both release the GIL on long texts.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tiktoken

from adapters.tokenizers.byte_level import merge_table
from adapters.tokenizers.decoding import DecodesTokens
from adapters.tokenizers.definition import (
    AddedToken,
    MergeTable,
    NotRepresentable,
    Section,
    TokenizerDefinition,
)
from adapters.tokenizers.kept import keep
from adapters.tokenizers.patterns import split_pattern
from adapters.tokenizers.pieces import may_be_cut, pieces, places
from adapters.tokenizers.pre_tokens import PreTokenEncoder

# tiktoken's regex engine backtracks over a run of whitespace; its stack ends near 10^6 characters.
_WHITESPACE_RUN = 8_192
# A pre-token up to this size is encoded by tiktoken in less than a millisecond
_SHORT_BYTES = 4_096
_WHITESPACE = bytes({*"".join(filter(str.isspace, map(chr, range(0x3001)))).encode()})  # its bytes
# The check for normalization holds the GIL, about 10 ns per character.
_MAX_SCAN = 200_000
# Characters outside these blocks are not checked: for these blocks Python's and `tokenizers`'
# normalization tables agree, although they are of different Unicode versions.
_UNSTABLE_NFC = re.compile(
    "[^\0-\u06ff\u0e00-\u0e7f\u1e00-\u2bff\u2e80-\u9fff\uac00-\ud7a3\U0001f000-\U0001faff]"
)


@dataclass(frozen=True, slots=True)
class SpecialTokenIds:
    """The special token ids before and after a text."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class TiktokenTokenizer(DecodesTokens):
    """The `Tokenizer` port over a tiktoken `Encoding`; safe to call from several threads."""

    def __init__(self, definition: TokenizerDefinition, cache: Path | None = None) -> None:
        super().__init__(definition)
        pattern = split_pattern(definition.pre_tokenizer)
        self._special_ids_around = _special_ids_around(definition.post_processor)
        self._normalizes_nfc = _normalizes_nfc(definition.normalizer)
        _check_added_tokens(definition.added, self._normalizes_nfc)
        _check_model(definition.model)
        added = {token.content: token.id for token in definition.added}
        table = _merges(definition, cache)
        self._ids = table.ids
        if table.ids is not None:
            first = len(table.ids)
            self._ids = [*table.ids, *added.values()]
            added = {content: first + place for place, content in enumerate(added)}
        self._encoding = tiktoken.Encoding(
            definition.path.parent.name,
            pat_str=pattern,
            mergeable_ranks=table.ranks,
            special_tokens=added,
        )
        self._spaces = _whitespace_encoding(table.ranks)
        table.ranks.clear()  # tiktoken has copied them, and would keep this dict
        self._added = frozenset(added)
        self._may_cut = may_be_cut(pattern) and not any(" " in content for content in added)
        self._places = places(added)
        self._pre_tokens = PreTokenEncoder(definition, self._ids_of_bytes)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """The ids of a pair of texts; see `EncodesPairs`. Raises `UnicodeEncodeError` for lone
        surrogates."""
        return self._pre_tokens.encode_pair(first, second)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. Raises `UnicodeEncodeError` for lone surrogates."""
        ids = self._ids_of(text)
        if not add_special_tokens or self._special_ids_around == SpecialTokenIds():
            return ids
        return [*self._special_ids_around.before, *ids, *self._special_ids_around.after]

    def encode_pieces(self, text: str, *, add_special_tokens: bool) -> Iterator[list[int]]:
        """The ids of a text in pieces; see `EncodesInPieces`.

        Raises `UnicodeEncodeError` for lone surrogates.
        """
        if not self._may_cut:
            yield self.encode(text, add_special_tokens=add_special_tokens)
            return
        around = self._special_ids_around if add_special_tokens else SpecialTokenIds()
        yield list(around.before)
        yield from map(self._ids_of, pieces(text, self._places))
        yield list(around.after)

    def _ids_of(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around it."""
        if not self._suits_tiktoken(text):
            return self._pre_tokens.encode(text)
        return self._token_ids(
            self._encoding.encode(text, allowed_special=self._added, disallowed_special=())
        )

    def _ids_of_bytes(self, pre_token: bytes) -> list[int]:
        """The ids of one pre-token, without the interpreter's lock if it is long.

        The expression matches a pre-token as a whole again, unless it is whitespace.
        """
        if len(pre_token) <= _SHORT_BYTES:
            return self._token_ids(self._encoding._encode_single_piece(pre_token))
        is_space = not pre_token.translate(None, _WHITESPACE)
        encoding = self._spaces if is_space else self._encoding
        return self._token_ids(encoding.encode_ordinary(pre_token.decode()))

    def _token_ids(self, found: list[int]) -> list[int]:
        """The ids of what tiktoken found."""
        return found if self._ids is None else list(map(self._ids.__getitem__, found))

    def _suits_tiktoken(self, text: str) -> bool:
        """Whether tiktoken gives Hugging Face's ids for this text."""
        if _has_long_whitespace(text):
            return False
        if text.isascii():
            return True
        if not self._normalizes_nfc:
            return _is_unicode(text)
        return (
            len(text) <= _MAX_SCAN
            and _UNSTABLE_NFC.search(text) is None
            and unicodedata.is_normalized("NFC", text)
        )


def open_tokenizer(definition: TokenizerDefinition, cache: Path | None = None) -> TiktokenTokenizer:
    """A tiktoken tokenizer, which is kept in `cache`. Raises `NotRepresentable` if it cannot
    give exactly the file's ids."""
    if definition.model.get("type") != "BPE":
        raise NotRepresentable(f"model {definition.model.get('type')}")
    return TiktokenTokenizer(definition, cache)


def _merges(definition: TokenizerDefinition, cache: Path | None) -> MergeTable:
    """The known merge table, or a new one, which is kept."""
    if definition.merges is not None:
        return definition.merges
    added = [token.content for token in definition.added]
    table = merge_table(definition.model, definition.vocab, added)
    if cache is not None:
        keep(definition, table, cache)
    return table


def _whitespace_encoding(ranks: Mapping[bytes, int]) -> tiktoken.Encoding:
    """An encoding of whitespace as one piece, however long, with the tokens that can occur."""
    return tiktoken.Encoding(
        "whitespace",
        pat_str=r"[\s\S]+",
        mergeable_ranks={
            token: rank for token, rank in ranks.items() if not token.translate(None, _WHITESPACE)
        },
        special_tokens={},
    )


def _has_long_whitespace(text: str) -> bool:
    """True if the text has 2 × `_WHITESPACE_RUN` whitespace characters in a row, false if it has
    no run of `_WHITESPACE_RUN`."""
    return any(
        text[at : at + _WHITESPACE_RUN].isspace()
        for at in range(0, len(text) - _WHITESPACE_RUN + 1, _WHITESPACE_RUN)
    )


def _is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogates, which tiktoken would silently replace."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_model(model: Section) -> None:
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise NotRepresentable(f"model.{name} is {model[name]!r}")


def _check_added_tokens(added: tuple[AddedToken, ...], normalizes_nfc: bool) -> None:
    """Raise `NotRepresentable` if matching depends on order, adjacent text or the normalizer."""
    if any(token.depends_on_context for token in added):
        raise NotRepresentable("added tokens with lstrip, rstrip or single_word")
    if len({token.is_normalized for token in added}) > 1:
        raise NotRepresentable("added tokens before and after the normalizer")
    if normalizes_nfc and any(token.is_normalized for token in added):
        raise NotRepresentable("added tokens after the normalizer")
    contents = sorted(token.content for token in added)
    for shorter, longer in pairwise(contents):
        if longer.startswith(shorter):
            raise NotRepresentable(f"added token {shorter!r} is a prefix of {longer!r}")


def _normalizes_nfc(normalizer: Section | None) -> bool:
    match normalizer:
        case None | {"type": "Sequence", "normalizers": []}:
            return False
        case {"type": "NFC"} | {"type": "Sequence", "normalizers": [{"type": "NFC"}]}:
            return True
    raise NotRepresentable(f"normalizer {normalizer.get('type') if normalizer else None}")


def _special_ids_around(post_processor: Section | None) -> SpecialTokenIds:
    match post_processor:
        case None | {"type": "ByteLevel"}:
            return SpecialTokenIds()
        case {"type": "TemplateProcessing", "single": [*pieces], "special_tokens": specials}:
            return _template_ids(pieces, specials)
        case {"type": "Sequence", "processors": [*steps]}:
            templates = [step for step in steps if step.get("type") != "ByteLevel"]
            if len(templates) <= 1:
                return _special_ids_around(templates[0] if templates else None)
    raise NotRepresentable(f"post_processor {post_processor.get('type')}")


def _template_ids(pieces: list[Section], specials: Section) -> SpecialTokenIds:
    sides: list[list[int]] = [[]]
    for piece in pieces:
        if "Sequence" in piece:
            sides.append([])
        else:
            sides[-1] += specials[piece["SpecialToken"]["id"]]["ids"]
    if len(sides) != 2:
        raise NotRepresentable("post_processor repeats or drops the text")
    return SpecialTokenIds(tuple(sides[0]), tuple(sides[1]))
