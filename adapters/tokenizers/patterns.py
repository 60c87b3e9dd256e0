"""How a byte-level pre-tokenizer cuts text into pieces, as one regular expression for tiktoken.

Hugging Face cuts with Oniguruma, tiktoken with Rust's engines. Accepted is the part of the
language that means the same to both, and whose only look-around is the blank-run idiom; and the
expression must take every character, because what matches nothing is dropped by tiktoken.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator

import tiktoken

from adapters.tokenizers.definition import NotRepresentable, Section

# The expression of `ByteLevel(use_regex=true)`, from GPT-2.
BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLANKS_BUT_LAST = r"\s+(?!\S)"
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
    """The expression of a byte-level `pre_tokenizer`; raises `NotRepresentable`."""
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
    # Files from before `use_regex` mean true.
    return [{"use_regex": True, **pre_tokenizer}]


def _check(pattern: str) -> None:
    plain = pattern.replace(_BLANKS_BUT_LAST + "|", "")
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
    for char in _one_of_each():
        if bytes(cuts.encode_ordinary(char)) != char.encode():
            raise NotRepresentable(f"pre_tokenizer's expression leaves {char!r} out")


def _one_of_each() -> Iterator[str]:
    """Every ASCII character, every blank, and one more of each Unicode category.

    An expression of `_SHARED` cannot tell other characters of one category apart.
    """
    yield from map(chr, range(0x80))
    seen: set[str] = {"Cs"}  # lone surrogates are no text
    for code in range(0x80, sys.maxunicode + 1):
        char = chr(code)
        if unicodedata.category(char) not in seen or (code < 0x3001 and char.isspace()):
            seen.add(unicodedata.category(char))
            yield char
        if len(seen) == 30 and code >= 0x3001:
            return
