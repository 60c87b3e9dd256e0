from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from adapters.gguf.tensors import GgufTensors
from adapters.models.checkpoint import read_config
from engine.worker.ports import HeadTiles, PreferredFormat, dequantize
from tests.engine.worker.cuda.standing import load_stored
from tests.engine.worker.process.driving import Driver, load_worker
from tests.models.checkpoints import LLAMA3_ROPE, LONGROPE, YARN
from tests.models.gguf_files import Gguf
from tests.models.gguf_k_blocks import WRITERS
from tests.models.loras import logits_of

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WIDER = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # blocks of 256
SLIDING = {"rope_type": "default", "rope_theta": YARN["rope_theta"]}
LONG_TENSORS = {
    f"rope_factors_{each}.weight": torch.tensor(LONGROPE[f"{each}_factor"])
    for each in ("short", "long")
}
# Divisors of the frequencies of full attention: those that are not 1 are not rotated.
PROPORTIONAL = {"rope_freqs.weight": torch.tensor([1.0, 1.0] + [1e30] * 6)}


def llama3_divisors() -> Tensor:
    """Of the frequencies, as llama.cpp computes them from the config."""
    plain = 1 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    turns = LLAMA3_ROPE["original_max_position_embeddings"] * plain / (2 * torch.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - share) / LLAMA3_ROPE["factor"] + share)
    return divisors


PLAIN = (
    *("llama", "llama_multi_query", "llama_tied", "llama_biases", "llama_wide_heads", "mistral"),
    *("qwen2", "qwen2_tied", "qwen3", "qwen3_biases", "gpt2", "gpt2_untied"),
    *("granite", "phi3", "stablelm", "olmo2", "gemma2"),
    *("mixtral", "mixtral_window", "qwen3_moe_renormalized", "olmoe"),
    *("qwen2_moe", "qwen3_5", "qwen3_5_grouped", "qwen3_5_moe", "lfm2"),
    *("granite_hybrid", "granite_hybrid_moe", "granite_hybrid_groups"),
    *("falcon_h1", "falcon_h1_norm", "nemotron_h"),
)
# Variants of `tests.models.checkpoints`, with what llama.cpp's form of the model needs beside them.
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in PLAIN},
    "gpt_oss": {
        "more": {
            "gpt-oss.rope.scaling.type": "yarn",
            "gpt-oss.rope.scaling.factor": 4.0,
            "gpt-oss.rope.scaling.original_context_length": 32,
        }
    },
    "phi3_short": {"extra": LONG_TENSORS},
    "phi3_long": {"extra": LONG_TENSORS},
    "gemma4": {"extra": PROPORTIONAL},
    "gemma4_plain": {"extra": PROPORTIONAL},
    "gemma4_moe": {"extra": PROPORTIONAL},
    # every fourth layer has no RoPE, every sixth one of Gemma 3 has full attention
    "smollm3": {"changes": {"no_rope_layer_interval": 4}},
    "gemma3": {"changes": {"num_hidden_layers": 6, "layer_types": None}},
    "olmo3": {  # has the name olmo2, and windows
        "changes": {"rope_parameters": {"sliding_attention": SLIDING, "full_attention": YARN}},
        "more": {"olmo2.attention.sliding_window_pattern": [True, False, True]},
    },
    "mistral_window": {"more": {"llama.attention.sliding_window": 7}},
    "llama_linear_rope": {
        "more": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    },
    "llama3_rope": {"extra": {"rope_freqs.weight": llama3_divisors()}},
}


def found(path: Path, **settings: str) -> Tensor:
    return Driver(load_worker(path, **settings)).logits((0, TOKENS))[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_gives_the_original_logits(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "model.gguf"
    model = Gguf(variant, **VARIANTS[variant]).write(path)
    assert (found(path) - logits_of(model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, *WRITERS])
def test_every_tensor_type_is_dequantized_exactly(tmp_path: Path, kind: Kind) -> None:
    path = tmp_path / "model.gguf"
    sizes = WIDER if kind in WRITERS else WIDE
    model = Gguf("llama", kind, changes=sizes).write(path)
    assert (found(path, weights="float32") - logits_of(model, TOKENS)).abs().max() < 1e-4


@pytest.mark.parametrize("variant", ["mixtral", "gpt_oss"])
def test_experts_are_computed_as_stored(tmp_path: Path, variant: str) -> None:
    path = tmp_path / "model.gguf"
    kinds = {"_exps": Kind.MXFP4} if variant == "gpt_oss" else {"ffn_down_exps": Kind.Q4_0}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    model = Gguf(variant, Kind.Q8_0, kinds, changes=sizes, **VARIANTS[variant]).write(path)
    worker = load_worker(path, attention="cpu", activation_bits="14")
    formats = "mxfp4+q8_0" if variant == "gpt_oss" else "int4+q8_0"
    assert worker.report.weights == f"{formats} (14-bit activations)"
    logits = logits_of(model, TOKENS)
    assert (Driver(worker).logits((0, TOKENS))[0] - logits).abs().max() < 5e-3 * logits.std()


def test_the_linears_of_a_mixed_file_are_computed_in_their_own_formats(tmp_path: Path) -> None:
    """As in files that llama-quantize calls Q4_K_M, in which some matrices are Q6_K."""
    path = tmp_path / "model.gguf"
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.IQ4_XS, "attn_output": Kind.Q4_0}
    model = Gguf("llama", Kind.Q4_K, kinds=kinds, changes=WIDER).write(path)
    worker = load_worker(path, attention="cpu", activation_bits="14")
    assert worker.report.weights == "int4+iq4_xs+q4_k+q6_k (14-bit activations)"
    logits = logits_of(model, TOKENS)
    assert (Driver(worker).logits((0, TOKENS))[0] - logits).abs().max() < 5e-3 * logits.std()
    on_gpu = load_stored(path)
    assert on_gpu.report.weights == "int4+q4_k+int8"
    found = Driver(on_gpu).logits((0, TOKENS))[0]
    assert float((found - logits).norm() / logits.norm()) < 0.1  # as far as int8


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_K])
def test_a_gpu_computes_4_bits_as_stored(tmp_path: Path, kind: Kind) -> None:
    """Scales and minimums of Q4_K are rounded to float16."""
    path = tmp_path / "model.gguf"
    model = Gguf("llama", kind, changes=WIDER).write(path)
    worker = load_stored(path)
    assert worker.report.weights == ("int4" if kind is Kind.Q4_0 else "q4_k")
    logits = logits_of(model, TOKENS)
    allowed = 1e-4 if kind is Kind.Q4_0 else 5e-3 * logits.std()
    assert (Driver(worker).logits((0, TOKENS))[0] - logits).abs().max() < allowed


def test_the_format_that_auto_chooses_for_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def preferred(variant: str, kind: Kind, **sizes: int) -> PreferredFormat:
        Gguf(variant, kind, changes=sizes).write(path)
        return GgufTensors(path).preferred_format

    assert preferred("llama", Kind.Q4_0, **WIDE) == PreferredFormat("int8", ("int4",))
    assert preferred("llama", Kind.Q8_0, **WIDE) == PreferredFormat(None, ("q8_0",))
    assert preferred("gpt2", Kind.Q4_0, n_embd=64) == PreferredFormat("int8")
    assert preferred("llama", Kind.F16) == PreferredFormat(floats="float16")
    assert preferred("llama", Kind.BF16) == PreferredFormat(floats="bfloat16")
    assert preferred("granite_hybrid", Kind.BF16) == PreferredFormat(floats="bfloat16")


def test_a_slice_of_columns_is_stored_only_if_it_has_whole_blocks(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = Gguf("llama", Kind.Q4_0, changes=WIDE).write(path)
    name, rows = "model.layers.1.mlp.down_proj.weight", slice(3, 9)
    whole = dict(model.named_parameters())[name]
    tensors = GgufTensors(path)
    for columns, is_stored in ((slice(32, 96), True), (slice(0, 48), False)):
        part = tensors.read(name, (rows, columns))
        assert isinstance(part, Tensor) != is_stored
        assert torch.equal(dequantize(part), whole[rows, columns])


@pytest.mark.parametrize("columns", [slice(0, 24), slice(12, 40)])
def test_columns_of_value_heads_equal_those_of_the_whole_tensor(
    tmp_path: Path, columns: slice
) -> None:
    path = tmp_path / "model.gguf"
    model = Gguf("qwen3_5_grouped").write(path)
    name, rows = "model.layers.0.linear_attn.out_proj.weight", slice(3, 9)
    whole = dict(model.named_parameters())[name]
    tensors = GgufTensors(path)
    assert torch.equal(dequantize(tensors.read(name, (rows, columns))), whole[rows, columns])
    stored = dequantize(tensors.read(name, (rows, slice(None))))
    assert torch.equal(stored, HeadTiles(2, 2).tiled(whole[rows]))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K])
def test_the_outputs_of_value_heads_are_multiplied_as_stored(tmp_path: Path, kind: Kind) -> None:
    """Blocks of Q4_K have 256 columns, so parts of several heads."""
    path = tmp_path / "model.gguf"
    sizes = {"linear_num_value_heads": 8, "linear_value_head_dim": 64}
    model = Gguf("qwen3_5", kinds={"ssm_out": kind}, changes=sizes).write(path)
    part = slice(0, 32), slice(0, 512)
    stored = GgufTensors(path).read("model.layers.0.linear_attn.out_proj.weight", part)
    assert not isinstance(stored, Tensor)
    logits, exact = logits_of(model, TOKENS), {"attention": "cpu", "activation_bits": "14"}
    assert (found(path, **exact) - logits).abs().max() < 0.02 * logits.std()
    assert (found(path, weights="float32") - logits).abs().max() < 1e-4


@pytest.mark.parametrize("rows", [range(32), range(8), range(8, 24), range(3, 13)])
def test_slices_of_interleaved_rows_equal_those_of_the_whole_tensor(
    tmp_path: Path, rows: range
) -> None:
    path = tmp_path / "model.gguf"
    model = Gguf("llama_biases").write(path)
    projection = model.model.layers[1].self_attn.q_proj
    tensors, part = GgufTensors(path), slice(rows.start, rows.stop)
    for kind, whole in (("weight", projection.weight), ("bias", projection.bias)):
        read = dequantize(tensors.read(f"model.layers.1.self_attn.q_proj.{kind}", (part,)))
        assert torch.equal(read, whole[part])


def test_a_float32_is_read_as_its_shortest_decimal(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    Gguf("llama", more={"llama.attention.layer_norm_rms_epsilon": 1e-6}).write(path)
    assert read_config(path)["rms_norm_eps"] == 1e-6
