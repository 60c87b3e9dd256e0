"""Models that read images as two GGUF files: the decoder, and its image encoder (mmproj).

Names of tensors come from the `gguf` package; what llama.cpp's converter does beyond them is done
here: patches of two frames are two tensors, Qwen's merger and DeepStack have numbers of layers, and
one norm of Gemma 3 includes a 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from examples.benchmarks.peers.random_gguf import add_value
from examples.benchmarks.peers.random_mmproj import metadata
from tests.models.gguf_files import Gguf, tensor_names
from tests.models.images import make_model

# GGUF files of Gemma 3 do not say which layers have windows: every sixth one has none.
TEXT_CHANGES: dict[str, dict[str, Any]] = {"gemma3": {"num_hidden_layers": 6, "layer_types": None}}
STD = {"clip.vision.image_std": [0.5, 0.25, 0.5]}
TEXT_ROOTS = ("model.language_model.", "model.text_model.")
DEEPSTACK = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}
MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", "."]
MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<|im_start|>", "<|im_end|>")
SPECIAL = [*MARKS, *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
UNUSED = [f"unused{number}" for number in range(97 - len(LETTERS) - len(SPECIAL))]
CHAT: dict[str, Any] = {  # metadata of a SmolVLM decoder whose tokens are letters, for chats
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [*LETTERS, *SPECIAL, *UNUSED],
    "tokenizer.ggml.token_type": [1] * len(LETTERS) + [3] * len(SPECIAL) + [1] * len(UNUSED),
    "tokenizer.ggml.merges": [],
    "tokenizer.ggml.eos_token_id": len(LETTERS) + MARKS.index("<|im_end|>"),
    "tokenizer.chat_template": "{% for m in messages %}<|im_start|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}",
}


@dataclass(frozen=True)
class _Decoder:
    """The decoder of a model, as a model of its own."""

    model: Any

    @property
    def config(self) -> Any:
        return self.model.config.text_config

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.model.named_parameters():
            root = next((each for each in TEXT_ROOTS if name.startswith(each)), None)
            if root is not None:
                yield f"model.{name.removeprefix(root)}", tensor
            elif name.startswith("lm_head"):
                yield name, tensor

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()


@dataclass
class Mmproj:
    """What the two files are to hold; `more` and `without` are keys and tensors of the encoder's.

    `splits_qkv`: q, k and v are three tensors, as in older files; `is_swapped`: the MLP's linears
    have each other's name, as in still older ones.
    """

    variant: str
    kind: Kind = Kind.F32
    splits_qkv: bool = False
    is_swapped: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    text: dict[str, Any] = field(default_factory=dict)  # metadata of the decoder
    text_kinds: dict[str, Kind] = field(default_factory=dict)  # as `Gguf.kinds`

    def write(self, text: Path, encoder: Path) -> Any:
        """Write both files; returns transformers' model with what their tensors stand for."""
        model = make_model(self.variant, **TEXT_CHANGES.get(self.variant, {}))
        rope = model.config.text_config.rope_parameters
        sections = {}
        if "mrope_section" in rope:
            name = {"qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_5": "qwen35"}
            sections = {
                f"{name[self.variant]}.rope.dimension_sections": [*rope["mrope_section"], 0]
            }
        decoder = Gguf(self.variant, kinds=self.text_kinds, more=sections | self.text)
        decoder.write_model(text, _Decoder(model))
        self._write_encoder(encoder, model)
        return model

    def _write_encoder(self, path: Path, model: Any) -> None:
        writer = gguf.GGUFWriter(path, "clip")
        for key, value in (metadata(model.config.to_dict()) | STD | self.more).items():
            if key not in self.without:
                add_value(writer, key, value)
        for name, tensor in model.named_parameters():
            if not name.startswith((*TEXT_ROOTS, "lm_head")) and ".head." not in name:
                stored = self._add(writer, name, tensor.detach(), model.config)
                tensor.data.copy_(stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _add(self, writer: gguf.GGUFWriter, name: str, values: Tensor, config: Any) -> Tensor:
        """Returns what the file's tensors stand for, in Hugging Face's layout."""
        if "patch_embed.proj.weight" in name:
            frames = [
                self._store(writer, f"v.patch_embd.weight{suffix}", values[:, :, frame])
                for frame, suffix in enumerate(("", ".1"))
            ]
            return torch.stack(frames, dim=2)
        if ".qkv." in name and self.splits_qkv:
            own = self._own_name(name, config)
            parts = zip("qkv", values.chunk(3), strict=True)
            return torch.cat(
                [self._store(writer, own.replace("_qkv", f"_{q}"), each) for q, each in parts]
            )
        offset = 1 if "soft_emb_norm" in name else 0
        return self._store(writer, self._own_name(name, config), values + offset) - offset

    def _own_name(self, name: str, config: Any) -> str:
        part, _, kind = name.rpartition(".")
        if "deepstack_merger_list" in name:
            number, rest = part.split(".")[-2:]
            layer = config.vision_config.deepstack_visual_indexes[int(number)]
            return f"v.deepstack.{layer}.{DEEPSTACK[rest]}.{kind}"
        if ".visual.merger." in name and part.rpartition(".")[2] in MERGER:
            return f"{MERGER[part.rpartition('.')[2]]}.{kind}"
        vision = config.vision_config
        layers = getattr(vision, "depth", None) or vision.num_hidden_layers
        names = tensor_names(gguf.MODEL_ARCH.MMPROJ, layers)
        known = name.replace("model.visual.", "visual.").replace("_weight", ".weight")
        known = known.replace("model.vision_tower.", "vision_tower.vision_model.")
        known = known.replace("model.multi_modal", "multi_modal")
        own = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert own is not None, known
        if self.is_swapped and "ffn_gate" not in own:
            swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
            for one, other in swapped.items():
                if one in own:
                    return str(own).replace(one, other)
        return str(own)

    def _store(self, writer: gguf.GGUFWriter, own: str, values: Tensor) -> Tensor:
        """Put a tensor into the file; returns what it stands for there, as floats."""
        if own in self.without:
            return values
        values = values.contiguous()
        kind = self.kind if values.dim() == 2 and values.shape[1] % 32 == 0 else Kind.F32
        if kind is Kind.F32:
            writer.add_tensor(own, values.numpy())
            return values
        data = gguf.quants.quantize(values.numpy(), kind)
        writer.add_tensor(own, data, raw_dtype=kind)
        return torch.from_numpy(gguf.quants.dequantize(data, kind))
