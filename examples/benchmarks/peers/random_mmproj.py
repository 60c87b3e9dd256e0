"""Writes the two GGUF files of a named shape that reads images, with random weights: its decoder,
and its image encoder (mmproj).

The format is that of all matrices, as in `random_gguf`, but for the encoder's embeddings of patches
and positions, which are float32, as in the files that llama.cpp's converter writes.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

from adapters.gguf.projector import PROJECTORS, VISION
from adapters.gguf.projector_names import JOINED, WEIGHT
from adapters.models.named_shapes import VISION_SHAPES
from examples.benchmarks.peers import random_gguf
from examples.benchmarks.peers.random_blocks import DEVIATION, random_rows
from examples.benchmarks.peers.random_gguf import add_value

Config = Mapping[str, Any]
KINDS = {  # `clip.projector_type` by `model_type`
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "gemma3": "gemma3",
    "smolvlm": "idefics3",
}
MERGE = 2  # patches along each side of one of Qwen's tokens


def metadata(config: Config) -> dict[str, Any]:
    """The keys of an mmproj file, from a config.json."""
    vision, kind = config["vision_config"], config["model_type"]
    is_qwen = kind.startswith("qwen")
    heads = vision["num_heads" if is_qwen else "num_attention_heads"]
    values = {
        "block_count": _layers(vision),
        "projection_dim": config["text_config"]["hidden_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "patch_size": vision["patch_size"],
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    if is_qwen:
        values["image_size"] = vision["patch_size"] * int(_positions(vision) ** 0.5)
    else:
        values["image_size"] = vision["image_size"]
        values["projector.scale_factor"] = config["scale_factor"]
    if kind == "smolvlm":
        values["preproc_image_size"] = 4 * vision["image_size"]
    if kind == "qwen2_5_vl":
        values |= {"n_wa_pattern": 2, "window_size": vision["window_size"]}
    if added := vision.get("deepstack_visual_indexes"):
        values["is_deepstack_layers"] = [n in added for n in range(_layers(vision))]
    return {f"{VISION}{key}": value for key, value in values.items()} | {
        "clip.projector_type": KINDS[kind],
        "clip.has_vision_encoder": True,
        "clip.use_gelu": kind != "qwen2_5_vl",
    }


def _layers(vision: Config) -> int:
    return int(vision.get("depth") or vision["num_hidden_layers"])


def _positions(vision: Config) -> int:
    default = (vision.get("image_size", 0) // vision["patch_size"]) ** 2
    return int(vision.get("num_position_embeddings", default))


def tensors(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of an encoder without DeepStack."""
    vision = config["vision_config"]
    width, patch, inner = vision["hidden_size"], vision["patch_size"], vision["intermediate_size"]
    out, merged = (
        config["text_config"]["hidden_size"],
        width * config.get("scale_factor", MERGE) ** 2,
    )
    matrices = {
        JOINED: (3 * width, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
        "0": (merged, merged),
        "2": (out, merged),
        "fc": (out, merged),
        "position_embd": (_positions(vision), width),
        "patch_embd": (width, 3, patch, patch),
        **dict.fromkeys(("ln1", "ln2", "post_ln"), (width,)),
    }
    names, layers = PROJECTORS[KINDS[config["model_type"]]].names, range(_layers(vision))
    for name in names.needed(len(layers), {f"v.blk.{n}.{JOINED}{WEIGHT}" for n in layers}):
        part, kind = name.removesuffix(".1").rsplit(".", 1)
        shape = matrices.get(part.rpartition(".")[2], (width, width))
        yield name, shape if f".{kind}" == WEIGHT else shape[:1]


def write(shape: str, format: str, directory: Path) -> tuple[Path, Path]:
    """The files of the decoder and of the encoder, written if they are not there."""
    text = directory / f"{shape}-{format}.gguf"
    encoder = directory / f"mmproj-{shape}-{format}.gguf"
    if not text.exists():
        random_gguf.write(shape, format, text)
    if not encoder.exists():
        _write_encoder(VISION_SHAPES[shape], random_gguf.FORMATS[format], encoder)
    return text, encoder


def _write_encoder(config: Config, kind: GGMLQuantizationType, path: Path) -> None:
    """Scales of norms are 1, and biases 0."""
    writer, rng = gguf.GGUFWriter(path, "clip"), np.random.default_rng(0)
    for key, value in metadata(config).items():
        add_value(writer, key, value)
    for name, shape in tensors(config):
        if len(shape) == 1:
            writer.add_tensor(name, np.full(shape, float(name.endswith(WEIGHT)), np.float32))
        elif "_embd" in name:
            values = rng.standard_normal(shape, np.float32) * np.float32(DEVIATION)
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, random_rows(rng, kind, *shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
