"""What is wrong with a tokenizer.json, as far as its structure tells. Imports no library."""

from pathlib import Path

from adapters.tokenizers.definition import read_definition
from engine.errors import StartupError

MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")


def check_tokenizer(directory: Path) -> None:
    """Raise `StartupError` unless a checkpoint directory has a tokenizer.json of a known kind."""
    definition = read_definition(directory)
    kind = definition.model.get("type", "BPE")
    if kind not in MODELS:
        raise StartupError(
            f"{definition.path}: model type {kind!r} is not supported; known: {', '.join(MODELS)}"
        )
