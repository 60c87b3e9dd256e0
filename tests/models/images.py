"""Tiny random models with image encoders, in Hugging Face's own format, and images for them."""

from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from engine.media import Media, Pixels
from tests.models.checkpoints import GEMMA4, SMALL
from tests.models.recurrent_variants import QWEN3_5, SHARED_EXPERTS

IMAGE_ID = 90
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0}
GEMMA4_VISION: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "position_embedding_size": 20,
    "use_clipped_linears": True,
}

# Name of a variant: (config class, of the text, of the encoder).
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VL",
        {
            "head_dim": 16,
            "rope_parameters": ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        {"deepstack_visual_indexes": [0, 1]},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
        {"window_size": 12, "fullatt_block_indexes": [1], "hidden_act": "silu"},
    ),
    "qwen3_5": (
        "Qwen3_5",
        QWEN3_5
        | {
            "rope_parameters": ROPE
            | {
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            }
        },
        {},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        QWEN3_5
        | SHARED_EXPERTS
        | {
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "rope_parameters": ROPE
            | {
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.25,
            },
        },
        {},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {"image_size": 20, "num_attention_heads": 2, "num_hidden_layers": 3},
    ),
    "gemma4": ("Gemma4", GEMMA4, GEMMA4_VISION),
    "gemma4_whole": (
        "Gemma4",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": "vision",
        },
        GEMMA4_VISION | {"use_clipped_linears": False, "standardize": True},
    ),
    "smolvlm": (
        "SmolVLM",
        {"model_type": "llama"},
        {"image_size": 20, "num_attention_heads": 2, "num_hidden_layers": 3},
    ),
}
SQUARES = ("gemma3", "smolvlm")  # variants that read square images of one size

UNIFORM = ("gemma4", "gemma4_whole")  # variants whose patches have no frames


def make_model(variant: str, seed: int = 0, scale: float = 0.2, **changes: Any) -> Any:
    """A transformers model of a variant, every parameter random (norms and biases too); `scale` is
    that of matrices, and `changes` are of the decoder's config."""
    name, text, vision = VARIANTS[variant]
    config = getattr(transformers, f"{name}Config")(
        text_config=SMALL | text | changes,
        vision_config=VISION | vision,
        image_token_id=IMAGE_ID,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    config.scale_factor = 2  # of variants that have it
    config.mm_tokens_per_image = 25
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = parameter.dim() == 1 and parameter_name.endswith("weight")
            of_matrix = scale if parameter.dim() > 1 else 0.2
            parameter.copy_(1 + 0.1 * noise if is_scale else of_matrix * noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("_min", "_max")):  # of clipped linears: they clip some
                buffer.fill_(-0.9 if buffer_name.endswith("_min") else 0.8)
            elif "std_" in buffer_name:
                buffer.copy_(1 + 0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def make_checkpoint(directory: Path, variant: str) -> Path:
    """Write a variant's checkpoint into `directory` and return it."""
    make_model(variant).save_pretrained(directory)
    return directory


def numbers(pixels: Pixels, family: str, frames: int = 2) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Pixels as transformers' models of this `model_type` read them: squares, or patches, whose
    channels are last in Gemma 4, and each as many `frames` in Qwen's."""
    values = [pixels.values[channel][pixels.levels[:, channel]] for channel in range(3)]
    if pixels.levels.ndim == 4:
        return np.stack(values, 1)
    if family == "gemma4":
        return np.stack(values, -1).reshape(len(pixels.levels), -1)
    repeated = np.stack(values, 1)[:, :, None].repeat(frames, 2)
    return repeated.reshape(len(pixels.levels), -1)


@dataclass(frozen=True)
class Picture:
    """Random pixels of so many rows and columns of patches."""

    rows: int
    columns: int
    seed: int = 0
    is_square: bool = False  # not in the order of patches

    @property
    def pixels(self) -> Pixels:
        size: tuple[int, ...] = (self.rows * self.columns, 3, 2 * 2)
        if self.is_square:
            size = (1, 3, 2 * self.rows, 2 * self.columns)
        random = np.random.default_rng(self.seed)
        values = np.random.default_rng(7).standard_normal((3, 256)).astype(np.float32)
        return Pixels(random.integers(0, 256, size, dtype=np.uint8), values)

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns // 4

    def media(self, start: int) -> Media:
        """The image at a place of a prompt."""
        pixels = self.pixels
        digest = sha256(pixels.levels.tobytes()).digest()
        return Media(start, self.num_tokens, digest, pixels, (1, self.rows, self.columns))


def picture(variant: str, rows: int, columns: int, seed: int = 0) -> Picture:
    """A picture of such sizes, or of the one size that the variant reads."""
    if variant in SQUARES:
        return Picture(10, 10, seed, is_square=True)
    return Picture(rows, columns, seed)


@dataclass(frozen=True)
class Prompt:
    """Token ids with the images that some of them stand for."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...]
    pictures: tuple[Picture, ...]

    @classmethod
    def of(cls, *parts: Picture | list[int]) -> "Prompt":
        """Text and images one after the other."""
        tokens: list[int] = []
        media: list[Media] = []
        pictures = tuple(part for part in parts if isinstance(part, Picture))
        for part in parts:
            if isinstance(part, Picture):
                media.append(part.media(len(tokens)))
                tokens += [IMAGE_ID] * part.num_tokens
            else:
                tokens += part
        return cls(tuple(tokens), tuple(media), pictures)

    def expected(self, model: Any, output: tuple[int, ...] = ()) -> Tensor:
        """transformers' logits at every position, also of an `output` behind the prompt."""
        ids = torch.tensor([self.tokens + output])
        given = {}
        if self.media:
            if model.config.model_type == "gemma4":
                return self._padded(model, ids)
            family = model.config.model_type
            pixels = np.concatenate([numbers(each.pixels, family) for each in self.media])
            given = {
                "pixel_values": torch.from_numpy(pixels),
            }
            if model.config.model_type == "gemma3":
                given["token_type_ids"] = (ids == IMAGE_ID).int()
            elif pixels.ndim == 4:
                given["pixel_values"] = given["pixel_values"][None]
            else:
                given |= {
                    "image_grid_thw": torch.tensor([each.grid for each in self.media]),
                    "mm_token_type_ids": (ids == IMAGE_ID).int(),
                }
        with torch.no_grad():
            logits: Tensor = model(ids, **given).logits[0]
        return logits

    def _padded(self, model: Any, ids: Tensor) -> Tensor:
        """The logits of a model that reads images of as many patches, with their places."""
        most = max(each.num_patches for each in self.media)
        pixels = torch.zeros(len(self.media), most, 3 * 2 * 2)
        places = torch.full((len(self.media), most, 2), -1)
        for number, each in enumerate(self.media):
            _, rows, columns = each.grid
            down, across = np.divmod(np.arange(rows * columns), columns)
            pixels[number, : each.num_patches] = torch.from_numpy(numbers(each.pixels, "gemma4"))
            places[number, : each.num_patches] = torch.from_numpy(np.stack((across, down), -1))
        with torch.no_grad():
            logits: Tensor = model(
                ids,
                pixel_values=pixels,
                image_position_ids=places,
                mm_token_type_ids=(ids == IMAGE_ID).int(),
            ).logits[0]
        return logits
