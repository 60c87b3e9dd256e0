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
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
FALCON_H1_BLOCK = {
    **MAMBA,
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
NEMOTRON_H_BLOCK = {
    "attn_norm": "norm",
    **{name: f"mixer.{name[-1]}_proj" for name in ("attn_q", "attn_k", "attn_v")},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    **{name: each.replace("mamba.", "mixer.") for name, each in MAMBA.items()},
}
GRANITE_HYBRID_BLOCK = {
    **MAMBA,
    **dict.fromkeys(("ffn_gate", "ffn_gate_shexp"), "shared_mlp.gate_proj"),
    **dict.fromkeys(("ffn_up", "ffn_up_shexp"), "shared_mlp.up_proj"),
    **dict.fromkeys(("ffn_down", "ffn_down_shexp"), "shared_mlp.output_linear"),
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
}
LFM2_BLOCK = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv": "conv.{}",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
GEMMA_4_BLOCK = {
    **FOUR_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
# Of the layers for multi-token prediction, beside those of other layers.
MTP = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
# Tensors of a block whose Hugging Face names have no `.weight` or `.bias`.
EXACT = {
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
MAMBA_EXACT = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


FALCON_H1_EXACT = {**MAMBA_EXACT, "ffn_norm": "pre_ff_layernorm.weight"}  # without a suffix


class Names(NamedTuple):
    """The names of one architecture, without `.weight` and `.bias`."""

    whole: Mapping[str, str]
    block: Mapping[str, str]
    block_root: str
    interleaved: frozenset[str] = frozenset()  # rows are in llama.cpp's order of RoPE pairs
    transposed: frozenset[str] = frozenset()  # Hugging Face stores these as [in, out]
    exact: Mapping[str, str] = EXACT

    def of(self, name: str) -> str:
        """The Hugging Face name of a tensor; an unknown tensor keeps its own name."""
        stem, dot, kind = name.rpartition(".")
        if stem in self.whole:
            return f"{self.whole[stem]}.{kind}"
        root, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        part, _, expert = part.partition(".")
        exact = self.exact.get(name.removeprefix("blk.").partition(".")[2])
        if exact is not None:
            return f"{self.block_root}.{name.split('.')[1]}.{exact}"
        if root != "blk" or not layer.isdecimal() or part not in self.block:
            return name
        return f"{self.block_root}.{layer}.{self.block[part].format(expert)}{dot}{kind}"

    def of_mtp(self, layer: int, rest: str) -> str:
        """The Hugging Face name of a tensor of a layer for multi-token prediction; `rest` is its
        name within the block."""
        stem, dot, kind = rest.rpartition(".")
        if stem in MTP:
            return f"{MTP[stem]}{dot}{kind}"
        found = self.of(f"blk.{layer}.{rest}")
        return found.replace(self.block_root, "mtp.layers", 1)

    def is_interleaved(self, name: str) -> bool:
        return part_of(name) in self.interleaved

    def is_transposed(self, name: str) -> bool:
        return name.endswith(".weight") and part_of(name) in self.transposed


def part_of(name: str) -> str:
    """The name of a tensor within its block, without `.weight` or `.bias`."""
    stem = name.removesuffix(".weight").removesuffix(".bias")
    return stem.rpartition(".")[2]


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
    "qwen2vl": _ROTARY,
    "qwen3vl": _ROTARY,
    "qwen3moe": _with(EXPERTS),
    "olmoe": _with(EXPERTS),
    "gpt-oss": _with(GPT_OSS_BLOCK),
    "smollm3": _INTERLEAVED,
    "granite": _INTERLEAVED,
    "granitehybrid": _INTERLEAVED._replace(
        block={**ROTARY_BLOCK, **GRANITE_HYBRID_BLOCK}, exact=MAMBA_EXACT
    ),
    "phi3": _with({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "stablelm": _ROTARY,
    "olmo2": _with(POST_NORMS),
    "gemma2": _with(FOUR_NORMS),
    "gemma3": _with(FOUR_NORMS),
    "gemma4": _with(GEMMA_4_BLOCK)._replace(
        whole={
            **_ROTARY_WHOLE,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        }
    ),
    "qwen2moe": _with({**EXPERTS, **SHARED_EXPERT}),
    "falcon-h1": _with(FALCON_H1_BLOCK)._replace(
        whole={**_ROTARY_WHOLE, "output_norm": "model.final_layernorm"}, exact=FALCON_H1_EXACT
    ),
    "nemotron_h": Names(
        {
            "token_embd": "backbone.embeddings",
            "output_norm": "backbone.norm_f",
            "output": "lm_head",
        },
        NEMOTRON_H_BLOCK,
        "backbone.layers",
        interleaved=frozenset({"attn_q", "attn_k"}),
        exact={name: each.replace("mamba.", "mixer.") for name, each in MAMBA_EXACT.items()},
    ),
    "lfm2": _with(LFM2_BLOCK)._replace(
        whole={
            **_ROTARY_WHOLE,
            "output_norm": "model.embedding_norm",
            "token_embd_norm": "model.embedding_norm",
        }
    ),
    "qwen35": _with(DELTA_NET),
    "qwen35moe": _with({**DELTA_NET, **EXPERTS, **SHARED_EXPERT}),
}
