"""What is wrong with a tokenizer.json, as far as its structure tells. No library of tokenizers is
imported."""

from pathlib import Path

from adapters.tokenizers.definition import read_definition
from adapters.tokenizers.kept import is_kept
from engine.errors import StartupError

MODELS = ("BPE", "Unigram", "WordPiece", "WordLevel")


def check_tokenizer(directory: Path, cache: Path | None = None) -> None:
    """Raise `StartupError` unless a checkpoint directory has a tokenizer.json of a known kind. One
    that is kept in `cache` has been loaded before."""
    if cache is not None and is_kept(directory, cache):
        return
    definition = read_definition(directory)
    kind = definition.model.get("type", "BPE")
    if kind not in MODELS:
        raise StartupError(
            f"{definition.path}: model type {kind!r} is not supported; known: {', '.join(MODELS)}"
        )
