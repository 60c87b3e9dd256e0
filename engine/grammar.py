"""The port for a constrained decoding library; `adapters/grammar/` implements it.

Standard library only. The gateway uses it to check grammars before a request is accepted, the
worker of the last stage to compute token masks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.step import Grammar


class GrammarError(Exception):
    """The grammar cannot be used, or an output does not match it. The message is one line."""


class TokenTable(NamedTuple):
    """A vocabulary as bytes: `tokens[id]` is what the id adds to the output, empty if not shown.

    `special` has the control tokens by name; `encode` returns a text's ids without control tokens.
    """

    tokens: Sequence[bytes]
    special: Mapping[str, int]
    encode: Callable[[str], Sequence[int]]


class Mask(NamedTuple):
    """The ids that are allowed next: bit `id % 8` of byte `id // 8` is 1 for an allowed id.

    `accepts`: the output matches the grammar as it is, so that an end token is allowed.
    """

    bits: bytes
    accepts: bool


class Matcher(Protocol):
    """The state of one output in its grammar; unusable after a method raised `GrammarError`."""

    def feed(self, tokens: Sequence[int]) -> None:
        """Append these tokens, none of them an end token, to the output."""

    def mask(self) -> Mask:
        """The allowed next ids. May run in any thread and releases the GIL meanwhile."""

    def copy(self) -> "Matcher":
        """An independent copy with the same output."""


class GrammarCompiler(Protocol):
    """Compiles grammars over one vocabulary; safe to call from several threads."""

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher with an empty output. May take seconds. Raises `GrammarError`."""
