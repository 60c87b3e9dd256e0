"""Writes a checkpoint of a named shape in Hugging Face's format, with random weights and the
tokenizer of a GGUF file of that shape, for servers that read no GGUF files.

    python -m examples.benchmarks.peers.random_checkpoint SHAPE GGUF_FOLDER DIRECTORY
        [--dtype float32]

All weights are in memory at a time. The GGUF files of the shape in q8_0 are written too, if
GGUF_FOLDER has none.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from adapters.gguf.documents import DOCUMENTS, read_document
from adapters.models.named_shapes import IMAGES, SHAPES, VISION_SHAPES
from examples.benchmarks.peers import random_gguf, random_mmproj


def write(shape: str, folder: Path, directory: Path, dtype: str = "float32") -> None:
    """Write all files of the checkpoint."""
    text, documents = folder / f"{shape}-q8_0.gguf", {}
    if shape in VISION_SHAPES:
        text, encoder = random_mmproj.write(shape, "q8_0", folder)
        name = "preprocessor_config.json"
        documents[name] = read_document(encoder, name)
    elif not text.exists():
        random_gguf.write(shape, "q8_0", text)
    config: dict[str, Any] = dict({**SHAPES, **VISION_SHAPES}[shape])
    config.pop(IMAGES, None)
    if "scale_factor" in config:
        documents["processor_config.json"] = {"image_seq_len": tokens_of_a_tile(config)}
    model_class = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    model_class(model_class.config_class(**config, dtype=dtype)).save_pretrained(directory)
    for name in DOCUMENTS.keys() - {"config.json"}:
        documents[name] = read_document(text, name)
    documents["tokenizer_config.json"]["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document))


def tokens_of_a_tile(config: dict[str, Any]) -> int:
    """SmolVLM's, for its processor."""
    vision = config["vision_config"]
    side = vision["image_size"] // vision["patch_size"] // config["scale_factor"]
    return int(side * side)


def main() -> None:
    parser = argparse.ArgumentParser(description="A checkpoint with random weights.")
    parser.add_argument("shape", choices=[*SHAPES, *VISION_SHAPES])
    parser.add_argument("folder", type=Path, metavar="GGUF_FOLDER")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    write(options.shape, options.folder, options.directory, options.dtype)


if __name__ == "__main__":
    main()
