"""GGUF files read as if they were Hugging Face directories.

Models, tokenizers and dialects read a checkpoint's JSON documents; for a GGUF file these are built
in memory from its metadata. Files with unsupported features are rejected.
"""

from pathlib import Path

SUFFIX = ".gguf"


def is_gguf(checkpoint: Path) -> bool:
    """Whether the path has the suffix of a GGUF file."""
    return checkpoint.suffix.lower() == SUFFIX
