"""LoRA adapters beside the base model: requests for all of them share iterations.

    python examples/45_lora_adapters.py [NAME=DIR ...]

A DIR has an adapter for the built-in model as PEFT saves it. Without one, two random adapters are
made. An adapter's name is a model name, here and in every route of `podway serve --lora NAME=DIR`.
"""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from gateway.offline import Podway

QUESTION = [{"role": "user", "content": "Tell me a story."}]
LAYERS, HIDDEN, RANK = 4, 192, 8  # of the built-in model; of the adapters


def random_adapter(directory: Path, seed: int) -> Path:
    """An adapter of the built-in model's attention outputs."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        at = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        for factor, shape in (("A", (RANK, HIDDEN)), ("B", (HIDDEN, RANK))):
            noise = torch.randn(shape, generator=generator)
            tensors[f"{at}.lora_{factor}.weight"] = 0.15 * noise
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["o_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        adapters = sys.argv[1:] or [
            f"{name}={random_adapter(Path(folder) / name, seed)}"
            for seed, name in enumerate(("first", "second"))
        ]
        names = ["builtin", *(adapter.partition("=")[0] for adapter in adapters)]
        with Podway("builtin", lora=",".join(adapters)) as model, ThreadPoolExecutor() as threads:

            def answer(name: str) -> str:
                (found,) = model.chat([QUESTION], model=name, temperature=0, max_tokens=24)
                return " ".join(found.text.split())

            for name, text in zip(names, threads.map(answer, names), strict=True):
                print(f"{name}: {text}")


if __name__ == "__main__":
    main()
