"""The regular expression of a byte-level pre-tokenizer, checked for use in tiktoken.

Hugging Face uses Oniguruma and tiktoken Rust's regex crates. Accepted is the subset of the syntax
with the same meaning in both, whose only look-around is the idiom for trailing whitespace. The
expression must match every character, since tiktoken drops text that does not match.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator

import tiktoken

from adapters.tokenizers.definition import NotRepresentable, Section

# The expression of `ByteLevel(use_regex=true)`, from GPT-2.
BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TRAILING_SPACES = r"\s+(?!\S)"
_SHARED = re.compile(
    r"""(?: \\[sSrnt]                    # classes and escapes
          | \\[pP]\{[A-Za-z]{1,2}\}
          | \(\?i: | \(\?: | \((?!\?) | \)  # groups
          | \[\^? | \] | \|
          | [?*+](?![?*+])               # greedy only
          | \{\d+(?:,\d*)?\}(?![?*+])
          | [A-Za-z0-9 '"/,;:!_<>=@\#~]  # literals
        )*""",
    re.VERBOSE,
)


def split_pattern(pre_tokenizer: Section | None) -> str:
    """The expression of a byte-level `pre_tokenizer`. Raises `NotRepresentable`."""
    steps = _steps(pre_tokenizer)
    match steps:
        case [{"type": "ByteLevel", "use_regex": True} as last]:
            pattern = BYTE_LEVEL_PATTERN
        case [
            {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": behavior,
                "invert": invert,
            },
            {"type": "ByteLevel", "use_regex": False} as last,
        ] if (behavior, invert) in {("Isolated", False), ("Removed", True)}:
            pass
        case _:
            raise NotRepresentable(f"pre_tokenizer {[step.get('type') for step in steps]}")
    if last.get("add_prefix_space", True):
        raise NotRepresentable("pre_tokenizer adds a space in front")
    _check(pattern)
    return pattern


def _steps(pre_tokenizer: Section | None) -> list[Section]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer["pretokenizers"])
    # In files older than the field `use_regex` it is true.
    return [{"use_regex": True, **pre_tokenizer}]


def _check(pattern: str) -> None:
    plain = pattern.replace(_TRAILING_SPACES + "|", "")
    if not _SHARED.fullmatch(plain):
        raise NotRepresentable(f"pre_tokenizer's expression {pattern!r}")
    try:
        cuts = tiktoken.Encoding(
            "cuts",
            pat_str=plain,
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={},
        )
    except ValueError as error:
        raise NotRepresentable(f"pre_tokenizer's expression: {error}") from error
    for char in _sample_characters():
        if bytes(cuts.encode_ordinary(char)) != char.encode():
            raise NotRepresentable(f"pre_tokenizer's expression does not match {char!r}")


def _sample_characters() -> Iterator[str]:
    """Every ASCII character, every whitespace character, and one of each Unicode category.

    An expression of `_SHARED` treats all other characters of a category alike.
    """
    yield from map(chr, range(0x80))
    seen: set[str] = {"Cs"}  # lone surrogates are not valid text
    for code in range(0x80, sys.maxunicode + 1):
        char = chr(code)
        if unicodedata.category(char) not in seen or (code < 0x3001 and char.isspace()):
            seen.add(unicodedata.category(char))
            yield char
        if len(seen) == 30 and code >= 0x3001:
            return
