"""Loads the tokenizer of a checkpoint. A library is imported when it is tried."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from adapters.tokenizers.definition import NotRepresentable, read_definition
from adapters.tokenizers.kept import read_kept
from engine.errors import StartupError

if TYPE_CHECKING:
    from gateway.ports import Tokenizer

# Tried in this order; the first one that represents the file exactly is used.
TOKENIZERS = {
    "tiktoken": "adapters.tokenizers.tiktoken_bpe:open_tokenizer",
    "huggingface": "adapters.tokenizers.huggingface:open_tokenizer",
}


def load_tokenizer(directory: Path, cache: Path | None = None) -> "Tokenizer":
    """The tokenizer of the checkpoint in `directory`, read from its `tokenizer.json`, or as an
    earlier call has kept it in `cache`.

    Raises `StartupError` if the file is missing, broken, or decodes in a way unknown here.
    """
    kept = None if cache is None else read_kept(directory, cache)
    definition = kept or read_definition(directory)
    reasons: list[str] = []
    for name, target in TOKENIZERS.items():
        module, opener = target.split(":")
        try:
            return cast("Tokenizer", getattr(import_module(module), opener)(definition, cache))
        except NotRepresentable as error:
            reasons.append(f"{name}: {error}")
    raise StartupError(f"{definition.path} is not supported ({'; '.join(reasons)})")
