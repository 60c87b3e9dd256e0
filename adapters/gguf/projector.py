"""Image encoders in files of their own (`mmproj` files), of which `general.architecture` is clip.

`PROJECTORS` has the kinds of encoder that are supported by `clip.projector_type`: which decoders
they belong to, and how keys become `vision_config` and the settings of the image processor.
"""

from collections.abc import Callable, Mapping
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

from adapters.gguf.checks import check_kinds
from adapters.gguf.file import GgufFile, shortest_decimal
from adapters.gguf.projector_names import (
    GEMMA_3,
    IDEFICS_3,
    QWEN_2_5,
    QWEN_3,
    ProjectorNames,
    deepstack_names,
)
from engine.errors import StartupError

Config = dict[str, Any]
CLIP = "clip"  # `general.architecture`
VISION = "clip.vision."
POSITIONS = "v.position_embd.weight"
FRAMES = 2  # frames per patch in Qwen's encoders
WINDOW_PIXELS = 112  # Qwen2.5-VL's, which its files leave out
GEMMA_BLOCK = 4  # patches along each side of a token, unless the file says otherwise


class Projector(NamedTuple):
    """One value of `clip.projector_type`."""

    families: Mapping[str, str]  # architecture of the decoder alone -> with the encoder
    model_type: str
    names: ProjectorNames
    config: Callable[[GgufFile], Config]  # what config.json has beside the decoder's fields
    processor: Callable[[GgufFile], Config]  # preprocessor_config.json


def _number(file: GgufFile, key: str) -> int:
    """A size that must be there and above 0."""
    value = file.integer(f"{VISION}{key}")
    if value is None or value < 1:
        raise file.error(f"{VISION}{key} is {value}, expected a number above 0")
    return value


def _pixels(file: GgufFile, key: str, default: int) -> int:
    return file.integer(f"{VISION}image_{key}_pixels") or default


def _normalization(file: GgufFile) -> Config:
    """Means and deviations of the channels."""
    found: Config = {}
    for name in ("image_mean", "image_std"):
        values = file.numbers(f"{VISION}{name}")
        if len(values) != 3 or (name == "image_std" and not all(values)):
            raise file.error(f"{VISION}{name} is {values}, expected three numbers")
        found[name] = [shortest_decimal(each) for each in values]
    return found


def _qwen(file: GgufFile, activation: str) -> Config:
    return {
        "depth": _number(file, "block_count"),
        "hidden_size": _number(file, "embedding_length"),
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_heads": _number(file, "attention.head_count"),
        "patch_size": _number(file, "patch_size"),
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": file.integer(f"{VISION}spatial_merge_size") or 2,
        "out_hidden_size": _number(file, "projection_dim"),
        "hidden_act": activation,
    }


def _qwen2_5_config(file: GgufFile) -> Config:
    """Every `n_wa_pattern`th layer has attention to the whole image; 0: all have."""
    vision, period = _qwen(file, "silu"), file.integer(f"{VISION}n_wa_pattern")
    if period is None or period < 0:
        raise file.error(f"{VISION}n_wa_pattern is {period}, expected a number")
    layers = range(vision["depth"])
    vision["fullatt_block_indexes"] = [n for n in layers if not period or (n + 1) % period == 0]
    vision["window_size"] = file.integer(f"{VISION}window_size") or WINDOW_PIXELS
    return {"vision_config": vision}


def _deepstack(file: GgufFile) -> list[int]:
    """The layers whose results are added behind the decoder's first ones."""
    flags = file.numbers(f"{VISION}is_deepstack_layers")
    return [layer for layer, is_added in enumerate(flags) if is_added]


def _qwen3_config(file: GgufFile) -> Config:
    vision = _qwen(file, "gelu_pytorch_tanh")
    if POSITIONS not in file.tensors:
        raise file.error(f"tensor {POSITIONS} is missing")
    vision["deepstack_visual_indexes"] = _deepstack(file)
    vision["num_position_embeddings"] = file.tensors[POSITIONS].shape[0]
    return {"vision_config": vision}


def _qwen_processor(file: GgufFile, least: int, most: int) -> Config:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": _number(file, "patch_size"),
        "merge_size": file.integer(f"{VISION}spatial_merge_size") or 2,
        "temporal_patch_size": FRAMES,
        "size": {
            "shortest_edge": _pixels(file, "min", least),
            "longest_edge": _pixels(file, "max", most),
        },
        **_normalization(file),
    }


def _siglip(file: GgufFile) -> Config:
    return {
        "num_hidden_layers": _number(file, "block_count"),
        "hidden_size": _number(file, "embedding_length"),
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_attention_heads": _number(file, "attention.head_count"),
        "image_size": _number(file, "image_size"),
        "patch_size": _number(file, "patch_size"),
        "layer_norm_eps": shortest_decimal(
            file.value(f"{VISION}attention.layer_norm_epsilon") or 1e-6
        ),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _gemma3_config(file: GgufFile) -> Config:
    vision = _siglip(file)
    block = file.integer(f"{VISION}projector.scale_factor") or GEMMA_BLOCK
    side = vision["image_size"] // vision["patch_size"] // block
    return {"vision_config": vision, "mm_tokens_per_image": side**2}


def _gemma3_processor(file: GgufFile) -> Config:
    side = _number(file, "image_size")
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": side, "width": side},
        **_normalization(file),
    }


def _idefics3_config(file: GgufFile) -> Config:
    return {
        "vision_config": _siglip(file),
        "scale_factor": _number(file, "projector.scale_factor"),
    }


def _idefics3_processor(file: GgufFile) -> Config:
    side = _number(file, "image_size")
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": file.integer(f"{VISION}preproc_image_size") or 4 * side},
        "max_image_size": {"longest_edge": side},
        **_normalization(file),
    }


PROJECTORS: Mapping[str, Projector] = {
    "qwen2.5vl_merger": Projector(
        {"Qwen2ForCausalLM": "Qwen2_5_VLForConditionalGeneration"},
        "qwen2_5_vl",
        QWEN_2_5,
        _qwen2_5_config,
        lambda file: _qwen_processor(file, 56 * 56, 12_845_056),
    ),
    "qwen3vl_merger": Projector(
        {
            "Qwen3ForCausalLM": "Qwen3VLForConditionalGeneration",
            "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
        },
        "qwen3_vl",
        QWEN_3,
        _qwen3_config,
        lambda file: _qwen_processor(file, 65_536, 16_777_216),
    ),
    "gemma3": Projector(
        {"Gemma3ForCausalLM": "Gemma3ForConditionalGeneration"},
        "gemma3",
        GEMMA_3,
        _gemma3_config,
        _gemma3_processor,
    ),
    "idefics3": Projector(
        {"LlamaForCausalLM": "SmolVLMForConditionalGeneration"},
        "smolvlm",
        IDEFICS_3,
        _idefics3_config,
        _idefics3_processor,
    ),
}


def is_projector(file: GgufFile) -> bool:
    return file.text("general.architecture") == CLIP


def projector_of(file: GgufFile) -> Projector:
    """The kind of encoder of an mmproj file. Raises `StartupError` for other files and kinds."""
    if not is_projector(file):
        raise file.error(
            f"general.architecture is {file.text('general.architecture')!r}; an image encoder "
            f"(--mmproj) has {CLIP!r}"
        )
    kind = file.text(f"{VISION}projector_type") or file.text("clip.projector_type")
    found = PROJECTORS.get(kind or "")
    if found is None:
        known = ", ".join(PROJECTORS)
        raise file.error(f"clip.projector_type {kind!r} is not supported; known: {known}")
    return found


def read_document(file: GgufFile, name: str) -> dict[str, object]:
    """What the image processor reads of an mmproj file, by the name of a checkpoint's file."""
    projector = projector_of(file)
    match name:
        case "config.json":
            return {"model_type": projector.model_type, **projector.config(file)}
        case "preprocessor_config.json":
            return projector.processor(file)
    return {}


def joined_config(text: Mapping[str, object], path: Path) -> dict[str, object]:
    """config.json of a decoder, whose own is `text`, with the encoder in an mmproj file. Raises
    `StartupError` if they do not belong together."""
    file = GgufFile(path)
    projector = projector_of(file)
    names = text["architectures"]
    name = str(names[0]) if isinstance(names, list) else str(names)
    family = projector.families.get(name)
    width = _number(file, "projection_dim")
    sizes = f"{VISION}projection_dim={width} and the model's hidden_size={text.get('hidden_size')}"
    if family is None:
        known = ", ".join(projector.families)
        raise file.error(f"this image encoder belongs to {known}, the model is {name} ({sizes})")
    if width != text.get("hidden_size"):
        raise file.error(f"{sizes} differ")
    rope, sections = text.get("rope_parameters"), text.get("mrope_section")
    if isinstance(rope, dict) and isinstance(sections, list):
        axes = {"mrope_section": sections[:3], "mrope_interleaved": projector.names is QWEN_3}
        text = {**text, "rope_parameters": {**rope, **axes}}
    return {
        "architectures": [family],
        "tie_word_embeddings": text.get("tie_word_embeddings"),
        "text_config": text,
        **read_document(file, "config.json"),
    }


def check_projector(text: Mapping[str, object], path: Path) -> dict[str, object]:
    """`joined_config` of a file whose tensors are all there, in types that can be read, and whose
    settings of images are known. Raises `StartupError` that names the key or tensor."""
    config = joined_config(text, path)
    file = GgufFile(path)
    projector = projector_of(file)
    projector.processor(file)
    check_kinds(file)
    layers = _number(file, "block_count")
    needed = [*projector.names.needed(layers, file.tensors), *deepstack_names(_deepstack(file))]
    for name in needed:
        if name not in file.tensors:
            raise file.error(f"tensor {name} is missing")
    vision = config["vision_config"]
    if isinstance(vision, dict) and "image_size" in vision:
        side = sqrt(file.tensors[POSITIONS].shape[0])
        expected = _number(file, "image_size") // _number(file, "patch_size")
        if side != expected:
            raise file.error(
                f"tensor {POSITIONS} has {side**2:g} rows; {VISION}image_size and "
                f"{VISION}patch_size imply {expected**2}"
            )
    return config


def find_projector(path: Path, text: Mapping[str, object]) -> Path | None:
    """The mmproj file beside a GGUF file that belongs to its model, None if there is no such file.
    Raises `StartupError` if several do, or none does."""
    found, refused = [], []
    for each in sorted(path.parent.glob("mmproj*.gguf")):
        try:
            joined_config(text, each)
            found.append(each)
        except StartupError as error:
            refused.append(str(error))
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise StartupError(
            f"{path.parent} has several image encoders ({names}): name one: --mmproj"
        )
    if refused and not found:
        raise StartupError(
            f"no image encoder beside {path} belongs to it: {'; '.join(refused)}; --mmproj names "
            "another file, and --mmproj off reads no images"
        )
    return found[0] if found else None
