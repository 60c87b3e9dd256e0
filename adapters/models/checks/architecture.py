"""The error for an architecture that no family reads."""

from collections.abc import Mapping
from difflib import get_close_matches

from adapters.models import FAMILIES
from engine.errors import StartupError

PAGE = "adapters/models/FAMILIES.md"
# Architectures that read images, and the one of their text part.
TEXT_PARTS = {
    "Idefics3ForConditionalGeneration": "LlamaForCausalLM",
    "InternVLForConditionalGeneration": "Qwen2ForCausalLM",
    "LlavaForConditionalGeneration": "LlamaForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
}


def check_architecture(config: Mapping[str, object]) -> str:
    """The architecture that config.json names. Raises `StartupError` unless a family reads it."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise StartupError(f"config.json: architectures is {names!r}, expected one name")
    name = str(names[0])
    if name in FAMILIES:
        return name
    if name in TEXT_PARTS:
        raise StartupError(
            f"config.json: architecture {name!r} reads images, which is not supported; its text "
            f"part could be served, if it is saved alone as {TEXT_PARTS[name]}"
        )
    near = get_close_matches(name, FAMILIES)
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    raise StartupError(
        f"config.json: architecture {name!r} is not supported; {nearest}all that are: {PAGE}"
    )
