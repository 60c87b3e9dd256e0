"""The tensor names of each architecture in llama.cpp, and those of Hugging Face."""

from collections.abc import Mapping
from typing import NamedTuple

ROTARY_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FOUR_NORMS = {**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
EXPERTS = {  # the linears of all experts in one tensor; `{}` is the expert
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
GPT_OSS_BLOCK = {
    **EXPERTS,
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
WITHOUT_KIND = {"attn_sinks"}  # whose Hugging Face names do not end in `.weight`
GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


class Names(NamedTuple):
    """The names of one architecture, without `.weight` and `.bias`."""

    whole: Mapping[str, str]
    block: Mapping[str, str]
    block_root: str
    interleaved: frozenset[str] = frozenset()  # rows are in llama.cpp's order of RoPE pairs
    transposed: frozenset[str] = frozenset()  # Hugging Face stores these as [in, out]

    def of(self, name: str) -> str:
        """The Hugging Face name of a tensor; an unknown tensor keeps its own name."""
        stem, dot, kind = name.rpartition(".")
        if stem in self.whole:
            return f"{self.whole[stem]}.{kind}"
        root, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        part, _, expert = part.partition(".")
        if root != "blk" or not layer.isdecimal() or part not in self.block:
            return name
        found = f"{self.block_root}.{layer}.{self.block[part].format(expert)}"
        return found if part in WITHOUT_KIND else f"{found}{dot}{kind}"

    def is_interleaved(self, name: str) -> bool:
        return _part(name) in self.interleaved

    def is_transposed(self, name: str) -> bool:
        return name.endswith(".weight") and _part(name) in self.transposed


def _part(name: str) -> str:
    """The name of a tensor within its block."""
    return name.rpartition(".")[0].rpartition(".")[2]


_ROTARY_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ROTARY = Names(_ROTARY_WHOLE, ROTARY_BLOCK, "model.layers")
_INTERLEAVED = _ROTARY._replace(interleaved=frozenset({"attn_q", "attn_k"}))


def _with(block: Mapping[str, str]) -> Names:
    """Llama's names, but for some tensors of a block."""
    return _ROTARY._replace(block={**ROTARY_BLOCK, **block})


_GPT2_WHOLE = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}

NAMES = {
    "gpt2": Names(
        _GPT2_WHOLE,
        GPT2_BLOCK,
        "transformer.h",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "llama": _INTERLEAVED._replace(block={**ROTARY_BLOCK, **MIXTRAL_EXPERTS}),
    "qwen2": _ROTARY,
    "qwen3": _ROTARY,
    "qwen3moe": _with(EXPERTS),
    "olmoe": _with(EXPERTS),
    "gpt-oss": _with(GPT_OSS_BLOCK),
    "smollm3": _INTERLEAVED,
    "granite": _INTERLEAVED,
    "phi3": _with({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "stablelm": _ROTARY,
    "olmo2": _with(POST_NORMS),
    "gemma2": _with(FOUR_NORMS),
    "gemma3": _with(FOUR_NORMS),
}


def names_of(architecture: str) -> Names | None:
    """The names of an architecture; None if it is unknown."""
    return NAMES.get(architecture)
