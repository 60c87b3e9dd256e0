"""The same weights in transformers, in float32, and in a worker on each device.

Weights are rounded to bfloat16 beforehand, so that both hold the same numbers. On a GPU the
allowed error is relative (L2): 2e-2, or twice that of transformers' own bfloat16 where that is
more. A sampled token is right if float32 finds it the likeliest, up to that error. Where two
experts are about equally likely, rounding chooses: some rows of mixtures may be farther.
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
from tests.engine.worker.process.driving import Driver, settings_for
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
GEMMA = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GEMMA4 = GEMMA | {"global_head_dim": 512}
# In DeepSeek's sizes
LATENT: dict[str, Any] = {
    "head_dim": 64,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 64,
}
# What a variant has besides `WIDE`
SIZES: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gemma4": GEMMA4,
    "gemma4_moe": GEMMA4
    | {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "moe_intermediate_size": 64},
    "phi3": {"hidden_size": 384, "head_dim": 96},
    "stablelm": {"hidden_size": 320, "head_dim": 80},
    "qwen3_moe": {"moe_intermediate_size": 64},
    "qwen2_moe": {"moe_intermediate_size": 64},
    "gpt_oss": {"intermediate_size": 64},
    "deepseek_v2": LATENT,
    "deepseek_v3_groups": LATENT | {"q_lora_rank": 96},
    "glm4_moe_lite": LATENT
    | {"q_lora_rank": 96, "num_attention_heads": 5, "num_key_value_heads": 5},
    "opt": {"ffn_dim": 384, "word_embed_proj_dim": 256},
}
GENTLE = 0.06  # of matrices: attention is no choice of one token, and errors stay small
BLOCK = 16
FLOAT32 = "cuda float32"  # in plain torch; the same text in batches of any size
TOLERANCE = {"cpu": 1e-5, "cuda": 2e-2, FLOAT32: 1e-4}


def on_gpu(device: str) -> Any:
    skips = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.param(device, marks=[pytest.mark.gpu, skips])


DEVICES = ["cpu", on_gpu("cuda")]
PRECISIONS = [*DEVICES, on_gpu(FLOAT32)]


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
        return shortfall(logits, output, self.tolerance)

    def check(self, errors: Sequence[float]) -> None:
        """Require that the errors of rows are allowed; of a mixture's rows, those of three in
        four."""
        is_mixture = any(".experts." in name for name, _ in self.model.named_parameters())
        count = -(-len(errors) * 3 // 4) if is_mixture else len(errors)
        assert sorted(errors)[count - 1] < self.tolerance


@dataclass(frozen=True)
class Pair(Oracle):
    """The same weights in transformers and in a worker."""

    worker: Worker

    def errors(self, steps: Sequence[Sequence[int]]) -> list[float]:
        """Of the logits behind each piece; a step has so many tokens of each text."""
        sizes = [sum(pieces) for pieces in zip(*steps, strict=True)]
        texts = [tokens_of(size, seed) for seed, size in enumerate(sizes)]
        expected = [self.expected(text) for text in texts]
        driver, done, errors = Driver(self.worker), [0] * len(texts), []
        for pieces in steps:
            asked = [(at, count) for at, count in enumerate(pieces) if count]
            asked.sort(key=lambda piece: piece[1] > 1)  # decodes come first
            found = driver.logits(*((at, texts[at][done[at] :][:count]) for at, count in asked))
            for row, (at, count) in zip(found.float().cpu(), asked, strict=True):
                done[at] += count
                errors.append(error(row, expected[at][done[at] - 1]))
        return errors


def shortfall(logits: Tensor, output: Sequence[int], tolerance: float) -> float:
    """That of `Oracle`, of the tokens of these rows."""
    chosen = logits[range(len(output)), list(output)]
    allowed = 4 * tolerance * logits.square().mean().sqrt()  # of two errors, at the tail
    return float(((logits.max(dim=-1).values - chosen) / allowed).max())


def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits.float()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def gentle_model(family: str, **changes: Any) -> Any:
    """Rounded to bfloat16."""
    config = VARIANTS[family][0]
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    wide = WIDE_GPT2 if config == "GPT2Config" else WIDE | SIZES.get(family, {})
    model = make_model(family, scale=GENTLE, **wide | changes)
    soften(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model


def soften(model: Any) -> None:
    """Make the scores of Gemma's normed queries small; they are not divided by the head's size."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name and model.config.model_type.startswith("gemma"):
                parameter.mul_(0.05)


def settings_on(device: str, directory: Path, **more: Any) -> WorkerSettings:
    """Settings for a checkpoint in this directory."""
    attention = "reference" if device == FLOAT32 else "auto"
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
        tolerance = max(tolerance, 2 * own_error(own, logits_of(model, text)))
    return Oracle(model, tolerance)


def own_error(found: Tensor, expected: Tensor) -> float:
    """Of all rows, or the one that nine of ten keep: some may have been to another expert."""
    rows = (found - expected).norm(dim=1) / expected.norm(dim=1)
    return min(error(found, expected), float(rows.quantile(0.9)))


def pair_of(model: Any, directory: Path, device: str, **more: Any) -> Pair:
    """The model beside a worker that has loaded its checkpoint."""
    oracle = oracle_of(model, directory, device)
    worker = Worker.load(settings_on(device, directory, **more), lambda *_: None)
    return Pair(model, oracle.tolerance, worker)


def tokens_of(length: int, seed: int) -> list[int]:
    return Random(seed).choices(range(97), k=length)
