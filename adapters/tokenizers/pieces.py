"""Long texts in pieces whose ids, one piece after the other, are those of the whole text.

A text may be cut before a space that lies between two other characters, if the pre-tokenizer's
expression never matches a space behind another character than whitespace. That holds if it holds
for each of its alternatives, and these are few in practice.
"""

from collections.abc import Iterator

PIECE_CHARS = 16_384  # about 2 ms of tiktoken's time

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


def pieces(text: str) -> Iterator[str]:
    """The pieces of a text: about `PIECE_CHARS` characters each, more where it cannot be cut."""
    start = 0
    while start < len(text):
        stop = _cut(text, start + PIECE_CHARS)
        yield text[start:stop]
        start = stop


def _cut(text: str, at: int) -> int:
    """The first place from `at` on where the text may be cut, or its end."""
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
