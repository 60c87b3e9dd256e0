"""GGUF files as if they were Hugging Face directories: their documents and their tensors.

Models, tokenizers and dialects read a checkpoint's JSON documents; of a GGUF file they are put
together from its metadata, in memory. What the file asks and nothing here gives is refused.
"""

from pathlib import Path

SUFFIX = ".gguf"


def is_gguf(checkpoint: Path) -> bool:
    """Whether a checkpoint is one file in this format, by its name."""
    return checkpoint.suffix.lower() == SUFFIX
