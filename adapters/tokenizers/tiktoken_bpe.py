"""Byte-level BPE (GPT-2, Llama 3, Qwen, …) in a tiktoken `Encoding`, with Hugging Face's ids.

What a file asks and tiktoken cannot give raises `NotRepresentable` at loading. What single texts
ask (Unicode composition, runs of blanks that would overflow tiktoken's stack) goes to
`tokenizers`, which is slower and as exact. Both release the interpreter's lock on long texts.
"""

import re
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import tiktoken

from adapters.tokenizers.byte_level import merge_table
from adapters.tokenizers.definition import (
    AddedToken,
    NotRepresentable,
    Section,
    TokenizerDefinition,
)
from adapters.tokenizers.huggingface import HuggingFaceTokenizer
from adapters.tokenizers.huggingface import open_tokenizer as open_huggingface
from adapters.tokenizers.patterns import split_pattern

if TYPE_CHECKING:
    from gateway.ports import TokenDecoder

# tiktoken backtracks over a run of blanks on a stack of its own, which ends near 10^6.
_BLANK_RUN = 8_192
# Looking for composition holds the interpreter's lock, about 10 ns per character.
_MAX_SCAN = 200_000
# Blocks in which Unicode has named all combining marks long ago, so that Python's and
# `tokenizers`' tables of composition, which are of different years, agree.
_UNSETTLED = re.compile(
    "[^\0-\u06ff\u0e00-\u0e7f\u1e00-\u2bff\u2e80-\u9fff\uac00-\ud7a3\U0001f000-\U0001faff]"
)


@dataclass(frozen=True, slots=True)
class SpecialFrame:
    """Ids that the model wants around a text with special tokens."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


class TiktokenTokenizer:
    """The `Tokenizer` port over a tiktoken `Encoding`; safe to call from several threads."""

    def __init__(self, definition: TokenizerDefinition, exact: HuggingFaceTokenizer) -> None:
        pattern = split_pattern(definition.pre_tokenizer)
        self._frame = _frame(definition.post_processor)
        self._composes = _composes(definition.normalizer)
        _check_added(definition.added, self._composes)
        _check_model(definition.model)
        added = {token.content: token.id for token in definition.added}
        table = merge_table(definition.model, definition.vocab, added)
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
        self._added = frozenset(added)
        self._exact = exact
        self.vocab_size = definition.vocab_size
        self.special_ids = definition.special_ids
        self.special_tokens = definition.special_tokens

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. Raises `UnicodeEncodeError` for lone surrogates."""
        if not self._is_plain(text):
            return self._exact.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = self._encoding.encode(
            text, allowed_special=self._added, disallowed_special=()
        )
        if self._ids is not None:
            ids = list(map(self._ids.__getitem__, ids))
        if not add_special_tokens or self._frame == SpecialFrame():
            return ids
        return [*self._frame.before, *ids, *self._frame.after]

    def decoder(self) -> "TokenDecoder":
        return self._exact.decoder()

    def token_bytes(self, token_id: int) -> bytes:
        return self._exact.token_bytes(token_id)

    def _is_plain(self, text: str) -> bool:
        """Whether tiktoken gives the exact ids of this text."""
        if _has_long_blank(text):
            return False
        if text.isascii():
            return True
        if not self._composes:
            return _is_unicode(text)
        return (
            len(text) <= _MAX_SCAN
            and _UNSETTLED.search(text) is None
            and unicodedata.is_normalized("NFC", text)
        )


def open_tokenizer(definition: TokenizerDefinition) -> TiktokenTokenizer:
    """Raises `NotRepresentable` if tiktoken cannot give exactly the ids of the file."""
    if definition.model.get("type") != "BPE":
        raise NotRepresentable(f"model {definition.model.get('type')}")
    return TiktokenTokenizer(definition, open_huggingface(definition))


def _has_long_blank(text: str) -> bool:
    """True for every run of two `_BLANK_RUN` blanks, false for every text without one."""
    return any(
        text[at : at + _BLANK_RUN].isspace()
        for at in range(0, len(text) - _BLANK_RUN + 1, _BLANK_RUN)
    )


def _is_unicode(text: str) -> bool:
    """Whether there are no lone surrogates, which tiktoken would silently replace."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_model(model: Section) -> None:
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise NotRepresentable(f"model.{name} is {model[name]!r}")


def _check_added(added: tuple[AddedToken, ...], composes: bool) -> None:
    """Matching must not depend on order, neighbours or the normalizer."""
    if any(token.has_margins for token in added):
        raise NotRepresentable("added tokens with lstrip, rstrip or single_word")
    if len({token.is_normalized for token in added}) > 1:
        raise NotRepresentable("added tokens before and after the normalizer")
    if composes and any(token.is_normalized for token in added):
        raise NotRepresentable("added tokens after the normalizer")
    contents = sorted(token.content for token in added)
    for shorter, longer in pairwise(contents):
        if longer.startswith(shorter):
            raise NotRepresentable(f"added token {shorter!r} begins {longer!r}")


def _composes(normalizer: Section | None) -> bool:
    match normalizer:
        case None | {"type": "Sequence", "normalizers": []}:
            return False
        case {"type": "NFC"} | {"type": "Sequence", "normalizers": [{"type": "NFC"}]}:
            return True
    raise NotRepresentable(f"normalizer {normalizer.get('type') if normalizer else None}")


def _frame(post_processor: Section | None) -> SpecialFrame:
    match post_processor:
        case None | {"type": "ByteLevel"}:
            return SpecialFrame()
        case {"type": "TemplateProcessing", "single": [*pieces], "special_tokens": specials}:
            return _template_frame(pieces, specials)
        case {"type": "Sequence", "processors": [*steps]}:
            templates = [step for step in steps if step.get("type") != "ByteLevel"]
            if len(templates) <= 1:
                return _frame(templates[0] if templates else None)
    raise NotRepresentable(f"post_processor {post_processor.get('type')}")


def _template_frame(pieces: list[Section], specials: Section) -> SpecialFrame:
    sides: list[list[int]] = [[]]
    for piece in pieces:
        if "Sequence" in piece:
            sides.append([])
        else:
            sides[-1] += specials[piece["SpecialToken"]["id"]]["ids"]
    if len(sides) != 2:
        raise NotRepresentable("post_processor repeats or drops the text")
    return SpecialFrame(tuple(sides[0]), tuple(sides[1]))
