import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import StartupError
from engine.worker.lora.loading import read_lora
from tests.models.loras import edit_tensors, make_lora

SIZES = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32)}
LINEARS = {
    f"model.layers.{layer}.self_attn.{name}_proj": sizes
    for layer in range(3)
    for name, sizes in SIZES.items()
}
FIRST = "base_model__model__model__layers__0__self_attn__q_proj__"


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return make_lora(tmp_path, target_modules=["q_proj", "v_proj"])


def edit_config(directory: Path, **changes: object) -> Path:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


def reason(directory: Path, max_rank: int = 64, digest: str = "") -> str:
    with pytest.raises(StartupError) as caught:
        read_lora(directory, LINEARS, max_rank, digest)
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("peft_type", "LOHA", "peft_type='LOHA': only 'LORA' is supported"),
        ("use_dora", True, "use_dora=True: DoRA cannot be served"),
        ("bias", "all", "bias='all': trained biases cannot be served"),
        ("modules_to_save", ["lm_head"], "modules_to_save=['lm_head']"),
        ("trainable_token_indices", [3], "trainable_token_indices=[3]"),
        ("init_lora_weights", "pissa_niter_4", "it changes the weights of the base model"),
        ("r", 0, "r=0: expected a positive integer"),
        ("r", 8, "has shape [4, 32], but the model and adapter_config.json imply [8, 32]"),
        ("lora_alpha", None, "lora_alpha=None: expected a positive number"),
        ("rank_pattern", {"(": 3}, "'(' is not a regular expression"),
        ("target_modules", 3, "target_modules=3: expected names of modules"),
        ("target_modules", ["v_proj"], "q_proj is not a target module of adapter_config.json"),
        ("target_modules", ["q_proj", "k_proj", "v_proj"], "k_proj, a target module"),
    ],
)
def test_a_config_that_is_not_supported_is_rejected_by_field(
    lora: Path, field: str, value: Any, message: str
) -> None:
    assert message in reason(edit_config(lora, **{field: value}))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("lora_A__weight", None, "q_proj.lora_A.weight is missing"),
        ("lora_A__weight", torch.zeros(4, 31), "has shape [4, 31], but"),
        ("lora_B__weight", torch.zeros(33, 4), "has shape [33, 4], but"),
        ("lora_B__weight", torch.full((32, 4), torch.nan), "has NaN or infinite values"),
        ("lora_B__weight", torch.zeros(32, 4, dtype=torch.int8), "expected floats"),
        ("lora_magnitude_vector", torch.zeros(32), "DoRA is not supported"),
        ("lora_B__bias", torch.zeros(32), "a bias of lora_B is not supported"),
        ("base_layer__bias", torch.zeros(32), "trained biases are not supported"),
        ("lora_C__weight", torch.zeros(32), "is not part of a LoRA"),
    ],
)
def test_a_tensor_that_does_not_fit_is_rejected_by_name(
    lora: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    found = reason(edit_tensors(lora, **{FIRST + name: tensor}))
    assert message in found
    assert "model.layers.0.self_attn.q_proj." in found


def test_an_adapter_of_another_model_is_rejected(lora: Path) -> None:
    name = "base_model__model__model__layers__3__self_attn__q_proj__lora_A__weight"
    found = reason(edit_tensors(lora, **{name: torch.zeros(4, 32)}))
    assert "layers.3.self_attn.q_proj.lora_A.weight: this model has no such linear" in found


def test_an_embedding_is_rejected_by_name(lora: Path) -> None:
    name = "base_model__model__model__embed_tokens__lora_embedding_A"
    found = reason(edit_tensors(lora, **{name: torch.zeros(4, 97)}))
    assert "embed_tokens.lora_embedding_A: LoRA on embeddings is not supported" in found


def test_the_rank_is_bounded(lora: Path) -> None:
    assert "has rank 4; --max-lora-rank allows 3" in reason(lora, max_rank=3)
    assert read_lora(lora, LINEARS, 4).rank == 4


def test_an_adapter_without_tensors_is_rejected(lora: Path) -> None:
    save_file({}, lora / "adapter_model.safetensors")
    assert reason(edit_config(lora, target_modules="all-linear")).endswith("has no tensors")


def test_missing_and_broken_files_are_named(lora: Path) -> None:
    file = lora / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    assert "adapter_model.safetensors is not a safetensors file" in reason(lora)
    file.unlink()
    assert "cannot read" in reason(lora)
    file.write_bytes(b"")
    (lora / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not JSON" in reason(lora)


def test_the_digest_is_of_the_bytes(lora: Path, tmp_path: Path) -> None:
    first = read_lora(lora, LINEARS, 64).digest
    copy = make_lora(tmp_path / "copy", target_modules=["q_proj", "v_proj"])
    (copy / "adapter_config.json").write_bytes((lora / "adapter_config.json").read_bytes())
    assert read_lora(copy, LINEARS, 64, first).digest == first
    other = edit_config(copy, lora_alpha=9)
    assert read_lora(other, LINEARS, 64).digest != first
    assert "have changed since the adapter was loaded" in reason(other, digest=first)
