"""The same weights in transformers, in float32, and in a worker on each device.

Weights are rounded to bfloat16 beforehand, so that both hold the same numbers. On a GPU the
allowed error is relative (L2): 2e-2, or twice that of transformers' own bfloat16 where that is
more. A sampled token is right if float32 finds it the likeliest, up to that error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from engine.worker.process.worker import Worker
from engine.worker_settings import WorkerSettings
from tests.engine.worker.process.driving import settings_for
from tests.models.checkpoints import VARIANTS, make_model
from tests.worker_settings import changed

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # kernels of GPUs know few
    "max_position_embeddings": 512,
}
WIDE_GPT2 = {"n_embd": 256, "n_head": 4, "n_positions": 512}
BLOCK = 16
FLOAT32 = "cuda float32"  # in plain torch; the same text in batches of any size
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2, FLOAT32: 1e-4}


def _on_gpu(device: str) -> Any:
    skips = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.param(device, marks=[pytest.mark.gpu, skips])


DEVICES = ["cpu", _on_gpu("cuda")]
PRECISIONS = [*DEVICES, _on_gpu(FLOAT32)]


@dataclass(frozen=True)
class Oracle:
    """A model of transformers in float32, and the relative error that a worker may have."""

    model: Any
    tolerance: float

    def expected(self, tokens: Sequence[int]) -> Tensor:
        """Logits at every position, `[tokens, vocab]`."""
        return logits_of(self.model, tokens)

    def shortfall(self, prompt: Sequence[int], output: Sequence[int]) -> float:
        """By how much the worst token of a greedy text is less likely than the likeliest, over
        what is allowed; at most 1 for a right one."""
        logits = self.expected([*prompt, *output[:-1]])[len(prompt) - 1 :]
        chosen = logits[range(len(output)), list(output)]
        allowed = 4 * self.tolerance * logits.square().mean().sqrt()  # of two errors, at the tail
        return float(((logits.max(dim=-1).values - chosen) / allowed).max())


@dataclass(frozen=True)
class Pair(Oracle):
    """The same weights in transformers and in a worker."""

    worker: Worker


def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.float()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def gentle_model(family: str) -> Any:
    """Rounded, and with attention that is no choice of one token."""
    config = VARIANTS[family][0]
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    model = make_model(family, **(WIDE_GPT2 if config == "GPT2Config" else WIDE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3 if parameter.dim() > 1 else 1.0)
            parameter.copy_(parameter.bfloat16().float())
    return model


def settings_on(device: str, directory: Path, **more: Any) -> WorkerSettings:
    """Settings for a checkpoint in this directory."""
    # XQA would be compiled for each of these small shapes
    attention = {"cuda": "flashinfer-fa2", FLOAT32: "reference"}.get(device, "auto")
    settings = settings_for(directory, attention, block_size=BLOCK, kv_slots=64 * BLOCK)
    if device == "cuda":
        settings = changed(settings, kv_cache_dtype="auto")
    if device == FLOAT32:
        settings = changed(settings, dtype="float32")
    return changed(settings, device=device.partition(" ")[0], **more)


def oracle_of(model: Any, directory: Path, device: str) -> Oracle:
    """The model beside its checkpoint, which this writes."""
    model.save_pretrained(directory)
    tolerance = TOLERANCE[device]
    if device == "cuda":
        load, text = transformers.AutoModelForCausalLM.from_pretrained, tokens_of(100, 7)
        own = logits_of(load(directory, dtype=torch.bfloat16), text)
        tolerance = max(tolerance, 2 * error(own, logits_of(model, text)))
    return Oracle(model, tolerance)


def pair_of(model: Any, directory: Path, device: str, **more: Any) -> Pair:
    """The model beside a worker that has loaded its checkpoint."""
    oracle = oracle_of(model, directory, device)
    worker = Worker.load(settings_on(device, directory, **more), lambda *_: None)
    return Pair(model, oracle.tolerance, worker)


def tokens_of(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(97), k=length)
