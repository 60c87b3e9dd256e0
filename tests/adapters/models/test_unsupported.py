import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from adapters.models.base import fields
from adapters.models.checkpoint import end_token_ids, resolve_checkpoint
from adapters.models.checks import architecture
from adapters.models.checks.checkpoint import check_checkpoint
from adapters.models.dense.minicpm import MiniCPM
from engine.errors import StartupError
from engine.worker.model import torch_operators
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import Driver, load_worker, settings_for
from tests.models.checkpoints import LLAMA3_ROPE, LONGROPE, make_checkpoint, make_model
from tests.worker_settings import worker_settings


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


@pytest.mark.parametrize(
    ("variant", "changes", "named"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM'"),
        ("llama", {"architectures": None}, "architectures"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'"),
        ("llama", {"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ("llama", {"vocab_size": None}, "vocab_size"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
        ("llama", {"sliding_window": 8}, "sliding_window=8"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"head_dim": 7}, "RoPE would turn 7 of the head's 7 dimensions"),
        ("minicpm", {"num_experts": 8}, "num_experts=8"),
        ("minicpm", {"sparse_config": {"dense_len": 0}}, "sparse_config: dense_len is 0"),
        (
            "stablelm",
            {"rope_parameters": {"partial_rotary_factor": 0.07}},
            "RoPE would turn 1 of the head's 16",
        ),
        (
            "stablelm",
            {"rope_parameters": {"partial_rotary_factor": 0.2}},
            "RoPE would turn 3 of the head's 16",
        ),
        (
            "stablelm",
            {"rope_parameters": {"partial_rotary_factor": 0.01}},
            "RoPE would turn 0 of the head's 16",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "short_factor"),
        ("llama", {"rope_parameters": "default"}, "rope_parameters is 'default'"),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("mixtral", {"num_local_experts": None}, "num_experts is missing"),
        ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 is more than the 5 experts"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] is not supported"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim=16"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("phi3_long", {"rope_parameters": {"rope_type": "su"}}, "short_factor is missing"),
        ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual=True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("olmo3", {"layer_types": ["full_attention"]}, "expected 3 names"),
        ("olmo3", {"layer_types": ["full_attention", "mamba", "mamba"]}, "'mamba'"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
        ("gemma4", {"enable_moe_block": True}, "num_experts is "),
        ("gemma4_moe", {"top_k_experts": 7}, "top_k_experts=7 is more than the 6 experts"),
        (
            "gemma4_moe",
            {"per_layer_config": {"1": {"num_key_value_heads": 2}}},
            "layers of a type have different heads",
        ),
        (
            "gemma4_moe",
            {"per_layer_config": {str(n): {"num_key_value_heads": 3} for n in (1, 3, 5)}},
            "num_key_value_heads=3 of some layers does not divide num_attention_heads=4",
        ),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers leaves no layer"),
        ("gemma4", {"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config is None"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("exaone4_window", {"sliding_window_pattern": "LX", "layer_types": None}, "is 'LX'"),
        ("glm4_moe", {"n_group": 3}, "n_group=3 does not divide n_routed_experts=8"),
        ("glm4_moe", {"n_group": 8, "topk_group": 2}, "groups of 2 experts or more"),
        ("glm4_moe", {"n_group": 4, "topk_group": 1}, "topk_group=1 does not fit n_group=4"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval=2 is not supported"),
        ("hunyuan_moe", {"moe_topk": [1, 2, 1]}, "moe_topk=[1, 2, 1] differs between layers"),
        ("deepseek_v2", {"v_head_dim": 25}, "v_head_dim=25 is more than the key's 24 dimensions"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types is ['sparse"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention'"),
        ("gpt_oss", {"sliding_window": "wide"}, "sliding_window is 'wide'"),
        (
            "llama",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers is 1000000000, expected at most",
        ),
        ("gpt2", {"n_layer": 10_001}, "n_layer is 10001, expected at most 10,000"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"activation_function": "mish"}, "activation_function='mish'"),
    ],
)
def test_the_error_for_an_unsupported_config_names_the_field(
    tmp_path: Path, variant: str, changes: dict[str, Any], named: str
) -> None:
    edit_config(make_checkpoint(tmp_path, variant), **changes)
    with pytest.raises(StartupError) as refused:
        load_worker(tmp_path)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Qwen2VLForSpeech", "is not supported"),
        ("LlamaForCausalML", "nearest: LlamaForCausalLM"),
        ("XYZ", "is not supported; all that are: "),
    ],
)
def test_an_unknown_architecture_is_refused_before_a_worker_starts_with_its_nearest_names(
    tmp_path: Path, name: str, nearest: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    with pytest.raises(StartupError) as refused:
        check_checkpoint(tmp_path, 0)
    message = str(refused.value)
    assert f"architecture {name!r} is not supported" in message
    assert nearest in message
    assert message.endswith("adapters/models/FAMILIES.md")
    assert len(message) < 300


def test_a_model_that_reads_images_is_refused_with_the_name_of_its_text_part() -> None:
    config = {"architectures": ["LlavaForConditionalGeneration"]}
    with pytest.raises(StartupError, match="saved alone as LlamaForCausalLM"):
        architecture.check_architecture(config)


def test_activations_are_those_of_the_operators() -> None:
    assert set(fields.ACTIVATIONS) == set(torch_operators.ACTIVATIONS)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model__norm__weight": None}, "tensor model.norm.weight is missing"),
        ({"model__norm__weight": torch.ones(31)}, "model.norm.weight has shape [31]"),
        ({"model__extra__weight": torch.ones(3)}, "tensor model.extra.weight"),
        ({"model__norm__weight": torch.ones(32, dtype=torch.int32)}, "is I32"),
    ],
)
def test_the_error_for_tensors_of_a_wrong_shape_names_them(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], named: str
) -> None:
    edit_weights(make_checkpoint(tmp_path), **changes)
    with pytest.raises(StartupError) as refused:
        load_worker(tmp_path)
    assert named in str(refused.value)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    edit_weights(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    load_worker(tmp_path)


def test_tensor_names_of_old_gpt2_checkpoints_are_read(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt2") / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, path)
    load_worker(tmp_path)


def test_the_older_rope_fields_are_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "new", "llama3_rope")
    make_checkpoint(tmp_path / "old", "llama3_rope")
    old = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    edit_config(tmp_path / "old", rope_parameters=None, rope_theta=10000.0, rope_scaling=old)
    new, old_logits = (
        Driver(load_worker(tmp_path / name)).logits((0, list(range(60)))) for name in ("new", "old")
    )
    torch.testing.assert_close(new, old_logits, rtol=0, atol=1e-5)


def test_a_context_ends_before_the_length_at_which_attention_is_sparse(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "minicpm")
    config = json.loads((directory / "config.json").read_text())
    sparse = {"sparse_config": {"dense_len": 100}}
    assert [MiniCPM(config | more).shape.max_positions for more in ({}, sparse)] == [128, 99]


@pytest.mark.parametrize("root", ["model.language_model", "language_model.model"])
def test_the_text_of_a_multimodal_gemma_is_served_with_a_warning(
    tmp_path: Path, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Names as transformers writes them today and as the checkpoints of 2025 have them."""
    directory = make_checkpoint(tmp_path, "gemma3")
    expected = Driver(load_worker(directory)).logits((0, [5, 6, 7]))
    config = json.loads((directory / "config.json").read_text())
    architectures = ["Gemma3ForConditionalGeneration"]
    (directory / "config.json").write_text(
        json.dumps({"architectures": architectures, "text_config": config, "eos_token_id": 2})
    )
    path = directory / "model.safetensors"
    tensors = {f"{root}{name[5:]}": tensor for name, tensor in load_file(path).items()}
    tower = {"vision_tower.patch.weight": torch.ones(3), "multi_modal_projector.x": torch.ones(2)}
    save_file(tensors | tower, path)
    found = Driver(load_worker(directory)).logits((0, [5, 6, 7]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert "config.json has no vision_config: only text is served" in caplog.text


def test_longrope_is_chosen_by_the_served_context(tmp_path: Path) -> None:
    long: dict[str, Any] = {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE}
    directory = make_checkpoint(tmp_path, "phi3_short", **long)
    model = make_model("phi3_short", **long)
    tokens = list(range(20))
    with torch.inference_mode():
        short = model(torch.tensor([tokens])).logits[0, -1]
    settings = replace(settings_for(directory), max_model_len=64)
    within = Worker.load(settings, lambda *_: None)
    beyond = load_worker(directory)
    assert (Driver(within).logits((0, tokens))[0] - short).abs().max() < 1e-4
    assert (Driver(beyond).logits((0, tokens))[0] - short).abs().max() > 1e-2


def test_a_pickled_checkpoint_is_rejected(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"only pytorch_model\.bin; .*safetensors only"):
        load_worker(tmp_path)


def test_a_damaged_file_is_rejected(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StartupError, match=r"cannot read .*model\.safetensors"):
        load_worker(tmp_path)


def test_a_sharded_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "whole")
    make_checkpoint(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    whole, sharded = (
        Driver(load_worker(tmp_path / name)).logits((0, [5, 6, 7])) for name in ("whole", "sharded")
    )
    torch.testing.assert_close(whole, sharded, rtol=0, atol=1e-5)


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, max_shard_size="20KB")
    sorted(tmp_path.glob("*.safetensors"))[1].unlink()
    with pytest.raises(StartupError, match=r"cannot read .*model-00002"):
        load_worker(tmp_path)


def test_a_half_precision_checkpoint_is_served_in_float32(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(path).items()}, path)
    worker = load_worker(tmp_path)
    assert worker.report.dtype == "float32"
    assert worker.report.num_parameters == sum(t.numel() for t in load_file(path).values())


def test_names_that_are_not_a_model_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for name, named in (
        (str(tmp_path / "file"), "is a file"),
        (str(tmp_path), "has no config.json"),
        (str(tmp_path / "absent" / "far" / "away"), "neither a directory nor a hub id"),
    ):
        with pytest.raises(StartupError, match=named):
            resolve_checkpoint(name)


@pytest.mark.parametrize("lost", [LocalEntryNotFoundError("no network"), ConnectionError()])
def test_a_hub_id_without_a_network_is_an_error(
    monkeypatch: pytest.MonkeyPatch, lost: Exception
) -> None:
    def download(model: str, **_: object) -> str:
        raise lost

    monkeypatch.setattr("adapters.models.hub.snapshot_download", download)
    with pytest.raises(StartupError, match="the hub cannot be reached"):
        resolve_checkpoint("someone/some-model")


def test_only_config_weights_and_tokenizer_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, **patterns: Any) -> str:
        asked.update(patterns, model=model)
        return str(make_checkpoint(tmp_path))

    monkeypatch.setattr("adapters.models.hub.snapshot_download", download)
    assert resolve_checkpoint("someone/some-model") == tmp_path
    wanted = ["chat_template.jinja", "config.json", "model-1.safetensors", "tokenizer.json"]
    others = ["pytorch_model.bin", "x.py", "consolidated.safetensors", "original/a.safetensors"]
    found = filter_repo_objects(
        wanted + others,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(found) == wanted


def test_a_config_that_is_nested_too_deeply_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(StartupError, match=r"config\.json is not JSON: maximum recursion depth"):
        load_worker(tmp_path)


def test_end_ids_come_from_the_generation_config_first(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    assert end_token_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert end_token_ids(tmp_path) == (3, 4)
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(StartupError, match=r"generation_config\.json is not JSON"):
        end_token_ids(tmp_path)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"attention": "magic"}, "attention 'magic'"),
        ({"max_model_len": 129}, "--max-model-len 129 is beyond"),
        (
            {"kv_memory": 1 << 50},
            "--kv-memory 1,048,576.0 GiB needs 1,048,576.0 GiB for the KV cache",
        ),
    ],
)
def test_unsupported_settings_are_rejected(
    tmp_path: Path, setting: dict[str, Any], named: str
) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(StartupError) as refused:
        Worker.load(worker_settings(model=str(tmp_path), **setting), lambda *_: None)
    assert named in str(refused.value)
