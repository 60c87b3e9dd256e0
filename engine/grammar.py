"""What the engine asks of a library for constrained decoding; `adapters/grammar/` provides it.

Standard library only: the gateway checks grammars with it before a request is accepted, the last
stage's worker computes masks with it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from engine.step import Grammar


class GrammarError(Exception):
    """A grammar that cannot be used, or an output that is not in it; says why on one line."""


class TokenTable(NamedTuple):
    """A vocabulary as bytes: what each id adds to an answer, nothing for those not shown.

    `special` are the control tokens by name, `encode` gives a text's ids without them.
    """

    tokens: Sequence[bytes]
    special: Mapping[str, int]
    encode: Callable[[str], Sequence[int]]


class Mask(NamedTuple):
    """What may come next: bit `id % 8` of byte `id // 8` is 1 for an id that may.

    `accepts`: the output is complete as it is, so that an end token may come.
    """

    bits: bytes
    accepts: bool


class Matcher(Protocol):
    """One output's place in its grammar. Methods raise `GrammarError`; then it is of no use."""

    def feed(self, tokens: Sequence[int]) -> None:
        """The output goes on with these tokens (no end token)."""
        ...

    def mask(self) -> Mask:
        """What may come next; may run in any thread, and lets others run meanwhile."""
        ...

    def copy(self) -> "Matcher":
        """Another output at the same place."""
        ...


class GrammarCompiler(Protocol):
    """Grammars over one vocabulary; safe to call from several threads."""

    def compile(self, grammar: Grammar) -> Matcher:
        """The place before the first token. May take seconds. Raises `GrammarError`."""
        ...


class MakesGrammarCompiler(Protocol):
    """A class in the table of `adapters.grammar`. `vocab_size` is the model's, which may have
    more ids than the table."""

    def __call__(self, table: TokenTable, vocab_size: int) -> GrammarCompiler: ...
