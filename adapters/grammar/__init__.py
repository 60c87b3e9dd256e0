"""Constrained decoding: libraries behind the port `engine.grammar`, by name."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.grammar import GrammarCompiler, MakesGrammarCompiler, TokenTable

LIBRARIES = {
    "llguidance": "adapters.grammar.llguidance_masks:LlguidanceCompiler",
}
DEFAULT_LIBRARY = "llguidance"


def open_compiler(
    table: "TokenTable", vocab_size: int, library: str = DEFAULT_LIBRARY
) -> "GrammarCompiler":
    """Grammars over a vocabulary. The library is imported now; large vocabularies take seconds."""
    module, name = LIBRARIES[library].split(":")
    makes: MakesGrammarCompiler = getattr(import_module(module), name)
    return makes(table, vocab_size)
