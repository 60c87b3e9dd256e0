"""How each architecture's metadata becomes config.json, beyond renamed fields.

What llama.cpp knows from an architecture's name alone, and so does not write, is filled in here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from adapters.gguf.file import GgufFile

Config = dict[str, Any]

ROTARY_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
WINDOW = {"attention.sliding_window": "sliding_window"}
EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
EXPERT_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
# Keys that repeat a head size, and the fields that have it.
HEAD_SIZES = {"attention.value_length": "head_dim", "rope.dimension_count": "head_dim"}
GPT2_FIELDS = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
GEMMA2_FIELDS = {
    **ROTARY_FIELDS,
    **WINDOW,
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA3_FIELDS = {**GEMMA2_FIELDS, "rope.freq_base_swa": "rope_local_base_freq"}
GRANITE_FIELDS = {
    **ROTARY_FIELDS,
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
    "ssm.inner_size": "mamba_d_ssm",
}
GRANITE_HYBRID_FIELDS = {
    **GRANITE_FIELDS,
    **EXPERTS,
    **MAMBA,
    "expert_shared_feed_forward_length": "shared_intermediate_size",
}
STABLELM_FIELDS = {
    **ROTARY_FIELDS,
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "use_parallel_residual": "use_parallel_residual",
}
OLMO2_FIELDS = {**ROTARY_FIELDS, **WINDOW, "attention.sliding_window_pattern": "layer_types"}
GEMMA4_FIELDS = {
    **ROTARY_FIELDS,
    **WINDOW,
    "attention.key_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window_pattern": "layer_types",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    **EXPERT_WIDTH,
}
GEMMA4_HEAD_SIZES = {
    "attention.value_length": "global_head_dim",
    "rope.dimension_count": "global_head_dim",
    "attention.value_length_swa": "head_dim",
    "rope.dimension_count_swa": "head_dim",
}
SECTIONS = {"rope.dimension_sections": "mrope_section"}  # equal for text
QWEN35_FIELDS = {
    **ROTARY_FIELDS,
    "attention.recurrent_layers": "layer_types",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_value_head_dim",  # the width of all heads together
    **SECTIONS,
    "nextn_predict_layers": "mtp_num_hidden_layers",
}
LFM2_FIELDS = {
    **ROTARY_FIELDS,
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "shortconv.l_cache": "conv_L_cache",
}
# Layers of the Gemmas with 27 B parameters, whose scores have another scale than head_dim ** -0.5.
GEMMA_27B_LAYERS = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}


class Architecture(NamedTuple):
    """One value of `general.architecture`; `fields` are its keys, which become fields of the
    family. `finish` changes the config, whose `rope_parameters` are there already."""

    family: str
    fields: Mapping[str, str] = ROTARY_FIELDS
    has_partial_rope: bool = False
    head_sizes: Mapping[str, str] = HEAD_SIZES
    finish: Callable[[GgufFile, Config], None] | None = None


def _mistral(file: GgufFile, config: Config) -> None:
    if config.get("num_local_experts"):
        config["architectures"] = ["MixtralForCausalLM"]
    elif "sliding_window" in config:
        config["architectures"] = ["MistralForCausalLM"]


def _qwen3_moe(file: GgufFile, config: Config) -> None:
    config["norm_topk_prob"] = True


def _gpt_oss(file: GgufFile, config: Config) -> None:
    config["rope_parameters"]["truncate"] = False


def _by_type(config: Config, full: Config, sliding: Config) -> None:
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": sliding}


def _olmo(file: GgufFile, config: Config) -> None:
    """OLMo 3 has the name of OLMo 2, and windows; RoPE scaling is that of full attention."""
    if "sliding_window" not in config:
        return
    config["architectures"] = ["Olmo3ForCausalLM"]
    pattern = config.pop("layer_types", None)
    if pattern is not None:
        names = ["sliding_attention" if each else "full_attention" for each in pattern]
        config["layer_types"] = names
    rope = config["rope_parameters"]
    _by_type(config, rope, {"rope_type": "default", "rope_theta": rope["rope_theta"]})


def _gemma(file: GgufFile, config: Config) -> None:
    """Norms are stored with the 1 that Hugging Face's leave out."""
    config["norms_include_one"] = True
    scalar = config.get("head_dim", 256)
    if config.get("num_hidden_layers") == GEMMA_27B_LAYERS[config["architectures"][0]]:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = scalar


def _gemma3(file: GgufFile, config: Config) -> None:
    _gemma(file, config)
    local = config.pop("rope_local_base_freq", 10000.0)
    sliding = {"rope_type": "default", "rope_theta": local}
    _by_type(config, config["rope_parameters"], sliding)


def _gemma4(file: GgufFile, config: Config) -> None:
    """Layers without KV of their own may have an MLP twice as wide. Full attention's RoPE has
    divisors as Llama 3's, of which those that are not 1 stop the rotation."""
    is_sliding = config["layer_types"]
    config["layer_types"] = _types(is_sliding, "sliding_attention", "full_attention")
    if isinstance(config["intermediate_size"], list):
        inner, *others = dict.fromkeys(config["intermediate_size"])
        if others not in ([], [2 * inner]):
            raise file.error(f"layers have intermediate_size of {inner} and {others[0]}")
        config["intermediate_size"], config["use_double_wide_mlp"] = inner, bool(others)
    if isinstance(config["num_key_value_heads"], list):
        _kv_heads_by_type(file, config, is_sliding)
    config["enable_moe_block"] = "num_experts" in config
    first = next((at for at, each in enumerate(is_sliding) if not each), None)
    config["attention_k_eq_v"] = (
        first is not None and f"blk.{first}.attn_v.weight" not in file.tensors
    )
    local = config.pop("rope_local_base_freq", 10000.0)
    sliding = {"rope_type": "default", "rope_theta": local}
    _by_type(config, config["rope_parameters"], sliding)


def _kv_heads_by_type(file: GgufFile, config: Config, is_sliding: list[bool]) -> None:
    heads = config["num_key_value_heads"]
    found: dict[bool, int] = {}
    for count, kind in zip(heads, is_sliding, strict=True):
        if found.setdefault(kind, count) != count:
            raise file.error(f"layers of a type have {found[kind]} and {count} KV heads")
    config["num_key_value_heads"] = found.get(True, heads[0])
    config["num_global_key_value_heads"] = found.get(False, heads[0])


def _types(flags: list[bool], if_set: str, otherwise: str) -> list[str]:
    return [if_set if each else otherwise for each in flags]


def _by_kv_heads(config: Config, without: str) -> list[str]:
    """The types of layers, of which those without KV heads have this one."""
    heads = config["num_key_value_heads"]
    if not isinstance(heads, list):
        return ["full_attention"] * config["num_hidden_layers"]
    config["num_key_value_heads"] = max(heads)
    return _types([each > 0 for each in heads], "full_attention", without)


def _lfm2(file: GgufFile, config: Config) -> None:
    """The width of the MLP is what it is."""
    config["layer_types"] = _by_kv_heads(config, "conv")
    config["block_auto_adjust_ff_dim"] = False


def _has(file: GgufFile, part: str) -> bool:
    """Whether a block has this tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{part}") for name in file.tensors)


def _mamba_biases(file: GgufFile) -> Config:
    return {
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
    }


def _falcon_h1(file: GgufFile, config: Config) -> None:
    """The multipliers are in the weights."""
    config |= _mamba_biases(file) | {
        "projectors_bias": _has(file, "ssm_out.bias"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def _nemotron_h(file: GgufFile, config: Config) -> None:
    """Layers with KV heads have attention, those with a width an MLP, and others Mamba."""
    heads, widths = config["num_key_value_heads"], config["intermediate_size"]
    if not isinstance(heads, list) or not isinstance(widths, list):
        raise file.error("nemotron_h: expected numbers of KV heads and widths of each layer")
    kinds = [
        "attention" if count else "mlp" if width else "mamba"
        for count, width in zip(heads, widths, strict=False)
    ]
    config |= _mamba_biases(file) | {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "intermediate_size": max(1, *widths),
        "mamba_d_head": config["mamba_d_ssm"] // config["mamba_n_heads"],
        "layer_norm_epsilon": config.get("rms_norm_eps", config.get("layer_norm_epsilon")),
        "mlp_bias": _has(file, "ffn_up.bias"),
    }


def _granite_hybrid(file: GgufFile, config: Config) -> None:
    """`rope.scaling.finetuned` says whether there is RoPE; gate and up are apart."""
    if "attention_multiplier" not in config:
        raise file.error("granitehybrid.attention.scale is missing: this is Bamba, not Granite 4")
    types = _by_kv_heads(config, "mamba")
    width, hidden = config["mamba_d_ssm"], config["hidden_size"]
    if width % hidden:
        raise file.error(f"granitehybrid.ssm.inner_size={width} is no multiple of {hidden}")
    has_rope = file.flag("granitehybrid.rope.scaling.finetuned")
    config.setdefault("num_local_experts", 0)
    config |= _mamba_biases(file) | {
        "layer_types": types,
        "mamba_expand": width // hidden,
        "attention_bias": _has(file, "attn_output.bias"),
        "position_embedding_type": "nope" if has_rope is False else "rope",
        "splits_gate_up": True,
    }


def _qwen2_moe(file: GgufFile, config: Config) -> None:
    config["norm_topk_prob"] = False


def _qwen3_5(file: GgufFile, config: Config) -> None:
    """The layers for multi-token prediction are behind the others, and counted with them."""
    config["norms_include_one"] = config["linear_out_proj_is_tiled"] = True
    config["num_hidden_layers"] -= config.get("mtp_num_hidden_layers", 0)
    config["linear_value_head_dim"] //= config["linear_num_value_heads"]
    if "layer_types" in config:
        own = config["layer_types"][: config["num_hidden_layers"]]
        config["layer_types"] = _types(own, "linear_attention", "full_attention")


ARCHITECTURES: Mapping[str, Architecture] = {
    "gpt2": Architecture("GPT2LMHeadModel", GPT2_FIELDS),
    "llama": Architecture(
        "LlamaForCausalLM", {**ROTARY_FIELDS, **WINDOW, **EXPERTS}, finish=_mistral
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM", {**ROTARY_FIELDS, **SECTIONS}),
    "qwen3vl": Architecture(
        "Qwen3ForCausalLM",
        {**ROTARY_FIELDS, **SECTIONS, "n_deepstack_layers": "num_deepstack_layers"},
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", {**ROTARY_FIELDS, **EXPERTS, **EXPERT_WIDTH}, finish=_qwen3_moe
    ),
    "olmoe": Architecture("OlmoeForCausalLM", {**ROTARY_FIELDS, **EXPERTS}),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        {**ROTARY_FIELDS, **WINDOW, **EXPERTS, **EXPERT_WIDTH},
        finish=_gpt_oss,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM", GRANITE_FIELDS),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", GRANITE_HYBRID_FIELDS, finish=_granite_hybrid
    ),
    "phi3": Architecture("Phi3ForCausalLM", {**ROTARY_FIELDS, **WINDOW}, has_partial_rope=True),
    "stablelm": Architecture("StableLmForCausalLM", STABLELM_FIELDS, has_partial_rope=True),
    "olmo2": Architecture("Olmo2ForCausalLM", OLMO2_FIELDS, finish=_olmo),
    "gemma2": Architecture("Gemma2ForCausalLM", GEMMA2_FIELDS, finish=_gemma),
    "gemma3": Architecture("Gemma3ForCausalLM", GEMMA3_FIELDS, finish=_gemma3),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", GEMMA4_FIELDS, head_sizes=GEMMA4_HEAD_SIZES, finish=_gemma4
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        {**ROTARY_FIELDS, **EXPERTS, **EXPERT_WIDTH, **SHARED_EXPERT},
        finish=_qwen2_moe,
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", {**ROTARY_FIELDS, **MAMBA}, finish=_falcon_h1),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        {**ROTARY_FIELDS, **MAMBA, "attention.layer_norm_epsilon": "layer_norm_epsilon"},
        has_partial_rope=True,  # it has none, but a number of dimensions
        finish=_nemotron_h,
    ),
    "lfm2": Architecture("Lfm2ForCausalLM", LFM2_FIELDS, finish=_lfm2),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM", QWEN35_FIELDS, has_partial_rope=True, finish=_qwen3_5
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        {**QWEN35_FIELDS, **EXPERTS, **EXPERT_WIDTH, **SHARED_EXPERT},
        has_partial_rope=True,
        finish=_qwen3_5,
    ),
}
