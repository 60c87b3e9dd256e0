"""Long texts in pieces whose ids, one piece after the other, are those of the whole text.

A text may be cut before a space that lies between two other characters, if the pre-tokenizer's
expression never matches a space behind another character than whitespace. That holds if it holds
for each of its alternatives, and these are few in practice. None of them matches a digit behind a
letter, a letter behind a digit, or, behind either, a newline or punctuation but the apostrophe: so
texts without spaces (base64, minified code, Chinese) may be cut there, unless an added token has
such a place.
"""

import re
from collections.abc import Iterable, Iterator
from string import punctuation

PIECE_CHARS = 16_384  # about 2 ms of tiktoken's time
SEARCHED_CHARS = 2_048  # a place other than a space is looked for in so many: 0.4 ms at most

_BEHIND_WORDS = punctuation.replace("'", "") + "\n、。，！？；：「」（）"

_ALTERNATIVES = frozenset(
    (
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
        *(r" ?\p{L}+", r" ?\p{N}+", r"\p{N}", r"\p{N}{1,3}", r"[^\r\n\p{L}\p{N}]?\p{L}+"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    )
)


def may_be_cut(pattern: str) -> bool:
    """Whether texts may be cut, as far as the pre-tokenizer's expression is concerned."""
    return all(part in _ALTERNATIVES for part in _alternatives(pattern))


def places(added: Iterable[str]) -> re.Pattern[str]:
    """Matches where texts may be cut; it matches in none of the `added` tokens."""
    behind_words = [char for char in _BEHIND_WORDS if not _has(added, _after_word(re.escape(char)))]
    kinds = [_after_word(re.escape("".join(behind_words)))] if behind_words else []
    kinds += [r"(?<=[A-Za-z])(?=[0-9])", r"(?<=[0-9])(?=[A-Za-z])", r"(?<=\S)(?= \S)"]
    return re.compile("|".join(kind for kind in kinds if not _has(added, kind)))


def _after_word(chars: str) -> str:
    """An expression for a place between a letter or digit and one of these characters."""
    return rf"(?<=[^\W_])(?=[{chars}])"


def _has(added: Iterable[str], expression: str) -> bool:
    return any(re.search(expression, content) for content in added)


def pieces(text: str, places: re.Pattern[str]) -> Iterator[str]:
    """The pieces of a text: about `PIECE_CHARS` characters each, more where it cannot be cut."""
    start = 0
    while start < len(text):
        stop = _cut(text, start + PIECE_CHARS, places)
        yield text[start:stop]
        start = stop


def _cut(text: str, at: int, places: re.Pattern[str]) -> int:
    """The first place from `at` on where the text may be cut, or its end. Far behind `at` it is
    only cut before spaces, which are found fast."""
    found = places.search(text, at, at + SEARCHED_CHARS)
    if found is not None and found.start() > 0:
        return found.start()
    while 0 < (at := text.find(" ", at)) < len(text) - 1:
        if not (text[at - 1].isspace() or text[at + 1].isspace()):
            return at
        at += 1
    return len(text)


def _alternatives(pattern: str) -> Iterator[str]:
    """The alternatives of an expression, split at each `|` outside of groups and classes."""
    begin = depth = at = 0
    while at < len(pattern):
        match pattern[at]:
            case "\\":
                at += 1
            case "(" | "[":
                depth += 1
            case ")" | "]":
                depth -= 1
            case "|" if depth == 0:
                yield pattern[begin:at]
                begin = at + 1
        at += 1
    yield pattern[begin:]
