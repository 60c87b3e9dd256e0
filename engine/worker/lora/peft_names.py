"""The names, ranks and shapes of an adapter's tensors, checked without torch.

Tensors are named `base_model.model.MODULE.lora_A.weight` `[rank, in]` and `….lora_B.weight`
`[out, rank]`, where MODULE is the linear's name in Hugging Face's model.
"""

from collections.abc import Mapping, Sequence

from engine.errors import StartupError
from engine.worker.lora.peft_config import CONFIG_FILE, PeftConfig

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIXES = ("base_model.model.", "")
_FACTORS = {".lora_A.weight": "A", ".lora_B.weight": "B"}
# Ends of tensor names that belong to what is not supported.
_UNSUPPORTED = {
    ".lora_magnitude_vector": "DoRA is not supported",
    ".lora_embedding_A": "LoRA on embeddings is not supported",
    ".lora_embedding_B": "LoRA on embeddings is not supported",
    ".lora_B.bias": "a bias of lora_B is not supported",
    ".bias": "trained biases are not supported",
}

# Parts of the names of linears in image encoders, and between them and the decoder.
_ENCODERS = {"visual", "vision_tower", "vision_model", "connector", "multi_modal_projector"}
_TEXT = "language_model."  # in the names of text models of multimodal ones, in one place or another


def is_of_encoder(module: str) -> bool:
    """Whether a module belongs to an image encoder."""
    return not _ENCODERS.isdisjoint(module.split("."))


def place_of(name: str, linears: Mapping[str, tuple[int, int]] | None) -> tuple[str, str]:
    """The module that a tensor belongs to, and which factor it is; without `linears`, which are
    those of the model, any module may be. Raises `StartupError`."""
    for end, why in _UNSUPPORTED.items():
        if name.removesuffix(".weight").endswith(end):
            raise StartupError(f"tensor {name}: {why}")
    for end, factor in _FACTORS.items():
        if name.endswith(end):
            path = name.removesuffix(end)
            if is_of_encoder(path):
                raise StartupError(f"tensor {name}: LoRA on an image encoder is not supported")
            module = _module_of(path, linears)
            if module is None:
                raise StartupError(f"tensor {name}: this model has no such linear for LoRA")
            return module, factor
    raise StartupError(f"tensor {name} is not part of a LoRA")


def check_target(name: str, module: str, config: PeftConfig) -> None:
    """Raise `StartupError` unless the config targets the module, by its name in the checkpoint or
    in the adapter."""
    path = _own_name(name).rpartition(".lora_")[0]
    if not config.targets_module(module) and not config.targets_module(path):
        raise StartupError(f"tensor {name}: {module} is not a target module of {CONFIG_FILE}")


def check_rank(module: str, config: PeftConfig, max_rank: int) -> None:
    """Raise `StartupError` if the module's rank is too high."""
    rank = config.rank_of(module)
    if rank > max_rank:
        raise StartupError(f"{module} has rank {rank}; --max-lora-rank allows {max_rank}")


def check_shape(
    module: str, factor: str, shape: Sequence[int], sizes: tuple[int, int], config: PeftConfig
) -> None:
    """Raise `StartupError` unless factor A or B of a module with these outputs and inputs has the
    right shape."""
    outputs, inputs = sizes
    rank = config.rank_of(module)
    expected = [rank, inputs] if factor == "A" else [outputs, rank]
    if list(shape) != expected:
        raise StartupError(
            f"tensor {module}.lora_{factor}.weight has shape {list(shape)}, but the model and "
            f"{CONFIG_FILE} imply {expected}"
        )


def _module_of(path: str, linears: Mapping[str, tuple[int, int]] | None) -> str | None:
    """The linear's name in this model. Old GPT-2 checkpoints lack `transformer.`; Nemotron-H's have
    `backbone.` for `model.`; text models of multimodal ones have `language_model.` in another
    place, or lack it."""
    path = _own_name(path)
    if linears is None:
        return path
    text = path.replace(_TEXT, "")
    backbone = f"backbone.{path.removeprefix('model.')}"
    for name in (path, path.removeprefix("transformer."), backbone, text):
        if name in linears:
            return name
    if text == path:
        return None
    return next((name for name in linears if name.replace(_TEXT, "") == text), None)


def _own_name(path: str) -> str:
    """The name without what PEFT puts before it."""
    for prefix in _PREFIXES:
        if path.startswith(prefix):
            return path.removeprefix(prefix)
    return path
