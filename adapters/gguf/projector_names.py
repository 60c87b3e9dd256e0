"""The tensor names of image encoders in llama.cpp, and those of Hugging Face."""

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

WEIGHT, BIAS = ".weight", ".bias"
BOTH = (WEIGHT, BIAS)
FIRST_FRAME, SECOND_FRAME = "v.patch_embd.weight", "v.patch_embd.weight.1"
QKV = ("attn_q", "attn_k", "attn_v")
JOINED = "attn_qkv"


class ProjectorNames(NamedTuple):
    """The names of one kind of encoder: of whole tensors, and without `.weight` and `.bias`."""

    whole: Mapping[str, str]  # exact
    parts: Mapping[str, str]  # the encoder's tensors, with biases
    block: Mapping[str, str]
    blocks: str  # what the Hugging Face names of a block begin with, before its number
    unbiased: Set[str] = frozenset()  # those names in `block` that are RMS norms
    joined: str = ""  # q, k and v are one linear of this name
    has_frames: bool = False  # patches are of two images

    def needed(self, num_layers: int, stored: Set[str] | Mapping[str, object]) -> Iterator[str]:
        """The names of all tensors that a file must have; `stored` are those that it has."""
        yield from self.whole
        if self.has_frames:
            yield from (FIRST_FRAME, SECOND_FRAME)
        yield from (f"{each}{kind}" for each in self.parts for kind in BOTH)
        for at in (f"v.blk.{number}." for number in range(num_layers)):
            parts = list(self.block)
            if self.joined:
                parts += [JOINED] if f"{at}{JOINED}{WEIGHT}" in stored else QKV
            for part in parts:
                kinds = (WEIGHT,) if part in self.unbiased else BOTH
                yield from (f"{at}{part}{kind}" for kind in kinds)


_SIGLIP_BLOCK = {
    "ln1": "layer_norm1",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def _siglip(root: str, projection: Mapping[str, str]) -> ProjectorNames:
    embeddings = f"{root}embeddings."
    return ProjectorNames(
        whole={"v.position_embd.weight": f"{embeddings}position_embedding.weight", **projection},
        parts={
            "v.patch_embd": f"{embeddings}patch_embedding",
            "v.post_ln": f"{root}post_layernorm",
        },
        block=_SIGLIP_BLOCK,
        blocks=f"{root}encoder.layers.",
    )


SOFT_NORM = "mm.soft_emb_norm.weight"  # stored with the 1 that Hugging Face's leaves out
GEMMA_3 = _siglip(
    "vision_tower.vision_model.",
    {
        SOFT_NORM: "multi_modal_projector.mm_soft_emb_norm.weight",
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
    },
)
IDEFICS_3 = _siglip(
    "model.vision_model.",
    {"mm.model.fc.weight": "model.connector.modality_projection.proj.weight"},
)
_QWEN_BLOCK = {"ln1": "norm1", "attn_out": "attn.proj", "ln2": "norm2"}
PATCHES = "visual.patch_embed.proj"
QWEN_2_5 = ProjectorNames(
    whole={"v.post_ln.weight": "visual.merger.ln_q.weight"},
    parts={"mm.0": "visual.merger.mlp.0", "mm.2": "visual.merger.mlp.2"},
    block={
        **_QWEN_BLOCK,
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    blocks="visual.blocks.",
    unbiased=frozenset({"ln1", "ln2"}),
    joined="attn.qkv",
    has_frames=True,
)
QWEN_3 = ProjectorNames(
    whole={
        "v.position_embd.weight": "visual.pos_embed.weight",
        "v.patch_embd.bias": f"{PATCHES}.bias",
    },
    parts={
        "v.post_ln": "visual.merger.norm",
        "mm.0": "visual.merger.linear_fc1",
        "mm.2": "visual.merger.linear_fc2",
    },
    block={**_QWEN_BLOCK, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    blocks="visual.blocks.",
    joined="attn.qkv",
    has_frames=True,
)
# Of a layer whose results are added behind the decoder's first ones; llama.cpp numbers them by the
# layer, Hugging Face one after the other.
DEEPSTACK = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
DEEPSTACK_LIST = "visual.deepstack_merger_list."


def deepstack_names(layers: Iterable[int]) -> Iterator[str]:
    """The names in the file of the tensors behind these layers."""
    for layer in layers:
        yield from (f"v.deepstack.{layer}.{part}{kind}" for part in DEEPSTACK for kind in BOTH)
