"""GGUF files read as if they were Hugging Face directories.

Models, tokenizers and dialects read a checkpoint's JSON documents; for a GGUF file these are built
in memory from its metadata. Files with unsupported features are rejected.
"""

import importlib
from pathlib import Path
from types import ModuleType
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


def check_file(path: Path, mmproj: Path | None = None) -> dict[str, object]:
    """config.json of a GGUF file, with the file of its image encoder, if there is one; their
    vocabulary, names and types of tensors are supported. Raises `StartupError`."""
    checks = importlib.import_module("adapters.gguf.checks")
    config = cast("dict[str, object]", checks.checked_config(path))
    if mmproj is None:
        return config
    return cast("dict[str, object]", _projectors().check_projector(config, mmproj))


def read_joined(path: Path, mmproj: Path) -> dict[str, object]:
    """config.json of a GGUF file with its image encoder in an mmproj file. Raises
    `StartupError`."""
    config = read_document(path, "config.json")
    return cast("dict[str, object]", _projectors().joined_config(config, mmproj))


def find_mmproj(path: Path) -> Path | None:
    """The file beside a GGUF file that has the image encoder of its model, None without one.
    Raises `StartupError` if there are several."""
    if not any(path.parent.glob("mmproj*.gguf")):
        return None
    config = read_document(path, "config.json")
    return cast("Path | None", _projectors().find_projector(path, config))


def _projectors() -> ModuleType:
    return importlib.import_module("adapters.gguf.projector")
