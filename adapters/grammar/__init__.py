"""Constrained decoding: grammar libraries behind the port `engine.grammar`, by name."""

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
    """A compiler of grammars over a vocabulary. Imports the library; a large vocabulary takes
    seconds."""
    module, name = LIBRARIES[library].split(":")
    make: MakesGrammarCompiler = getattr(import_module(module), name)
    return make(table, vocab_size)
