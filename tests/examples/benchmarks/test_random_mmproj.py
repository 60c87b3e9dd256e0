import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.gguf.file import GgufFile
from adapters.gguf.vocabulary import read_tokenizer
from adapters.models.checks.checkpoint import check_checkpoint
from adapters.models.named_shapes import IMAGES, VISION_SHAPES
from engine.worker.ports import Shard
from engine.worker.weights.checkpoint import Checkpoint
from examples.benchmarks.peers import random_checkpoint, random_gguf, random_mmproj


def shrunk(name: str) -> dict[str, Any]:
    """A shape with few layers and a small vocabulary."""
    config: dict[str, Any] = dict(VISION_SHAPES[name])
    images = config[IMAGES]
    tokens = {each: 4000 + number for number, each in enumerate(images["tokens"])}
    depth = "depth" if "depth" in config["vision_config"] else "num_hidden_layers"
    return config | {
        "text_config": config["text_config"] | {"num_hidden_layers": 4, "vocab_size": 4100},
        "vision_config": config["vision_config"] | {depth: 2},
        IMAGES: images | {"tokens": tokens},
    }


@pytest.mark.parametrize("name", VISION_SHAPES)
def test_both_files_of_a_shape_belong_together(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"small": shrunk(name)}
    for module in (random_gguf, random_mmproj):
        monkeypatch.setattr(module, "VISION_SHAPES", shapes)
    text, encoder = random_mmproj.write("small", "q8_0", tmp_path)
    assert check_checkpoint(text, 0, encoder) == {}
    checkpoint = Checkpoint.open(str(text), mmproj=str(encoder))
    weights = checkpoint.open_weights(torch.float32, lambda *_: None)
    checkpoint.survey(weights, Shard.whole(checkpoint.family.shape))
    assert checkpoint.encoder is not None
    assert checkpoint.encoder.num_layers == 2
    added = read_tokenizer(GgufFile(text))["added_tokens"]
    found = {each["content"]: each["id"] for each in added}
    assert shapes["small"][IMAGES]["tokens"].items() <= found.items()


def test_a_checkpoint_of_a_shape_has_the_vocabulary_of_its_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"small": shrunk("SmolVLM2-256M")}
    for module in (random_checkpoint, random_gguf, random_mmproj):
        monkeypatch.setattr(module, "VISION_SHAPES", shapes)
    random_checkpoint.write("small", tmp_path, tmp_path / "small")
    read = read_tokenizer(GgufFile(tmp_path / "small-q8_0.gguf"))
    assert json.loads((tmp_path / "small" / "tokenizer.json").read_text()) == read
    checkpoint = Checkpoint.open(str(tmp_path / "small"))
    weights = checkpoint.open_weights(torch.float32, lambda *_: None)
    checkpoint.survey(weights, Shard.whole(checkpoint.family.shape))
    assert checkpoint.encoder is not None
