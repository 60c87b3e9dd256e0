"""GGUF files read as if they were Hugging Face directories.

Models, tokenizers and dialects read a checkpoint's JSON documents; for a GGUF file these are built
in memory from its metadata. Files with unsupported features are rejected.
"""

import importlib
from pathlib import Path
from typing import cast

SUFFIX = ".gguf"


def is_gguf(checkpoint: Path) -> bool:
    """Whether the path has the suffix of a GGUF file."""
    return checkpoint.suffix.lower() == SUFFIX


def read_document(path: Path, name: str) -> dict[str, object]:
    """A document of a GGUF file by its file name; empty if there is none. Raises `StartupError`.

    The reader, with numpy and the `gguf` package, is imported with the first document.
    """
    documents = importlib.import_module("adapters.gguf.documents")
    return cast("dict[str, object]", documents.read_document(path, name))


def check_file(path: Path) -> dict[str, object]:
    """config.json of a GGUF file whose vocabulary and types of tensors are supported. Raises
    `StartupError`."""
    checks = importlib.import_module("adapters.gguf.checks")
    return cast("dict[str, object]", checks.checked_config(path))
