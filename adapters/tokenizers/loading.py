"""Loads the tokenizer of a checkpoint. A library is imported when it is tried."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast

from adapters.tokenizers.decoding import bytes_of_ids
from adapters.tokenizers.definition import NotRepresentable, TokenizerDefinition, read_definition
from adapters.tokenizers.huggingface import open_tokenizer
from adapters.tokenizers.kept import read_kept
from engine.errors import StartupError
from engine.grammar import TokenTable
from gateway.ports import Tokenizer

# Tried in this order; the first one that represents the file exactly is used.
TOKENIZERS = {
    "tiktoken": "adapters.tokenizers.tiktoken_bpe:open_tokenizer",
    "huggingface": "adapters.tokenizers.huggingface:open_tokenizer",
}


def load_tokenizer(directory: Path, cache: Path | None = None) -> Tokenizer:
    """The tokenizer of the checkpoint in `directory`, read from its `tokenizer.json`, or as an
    earlier call has kept it in `cache`.

    Raises `StartupError` if the file is missing, broken, or decodes in a way unknown here.
    """
    if cache is not None and (kept := read_kept(directory, cache)) is not None:
        return _opened("huggingface" if kept.merges is None else "tiktoken", kept, None)
    definition = read_definition(directory)
    reasons: list[str] = []
    for name in TOKENIZERS:
        try:
            return _opened(name, definition, cache)
        except NotRepresentable as error:
            reasons.append(f"{name}: {error}")
    raise StartupError(f"{definition.path} is not supported ({'; '.join(reasons)})")


def _opened(name: str, definition: TokenizerDefinition, cache: Path | None) -> Tokenizer:
    """The tokenizer in a library, which keeps it if there is a cache. Raises `NotRepresentable`."""
    module, opener = TOKENIZERS[name].split(":")
    return cast("Tokenizer", getattr(import_module(module), opener)(definition, cache))


def load_token_table(directory: Path, tokenizer: Tokenizer | None = None) -> TokenTable:
    """The bytes of each id within an output. Raises `StartupError`.

    A space that a decoder strips from the beginning of an output is included. `tokenizer` is the
    tokenizer of `directory` if it is already loaded.
    """
    definition = read_definition(directory)
    if tokenizer is None:  # gives the same ids as tiktoken and loads in half the time
        tokenizer = opened = open_tokenizer(definition)
        tokens = opened.table
    else:
        tokens = bytes_of_ids(definition)
    special = {token.content: token.id for token in definition.added if token.is_special}
    return TokenTable(
        tokens=tokens, special=special, encode=partial(tokenizer.encode, add_special_tokens=False)
    )
