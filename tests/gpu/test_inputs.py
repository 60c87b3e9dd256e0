"""Images, and texts that are embedded, in a whole worker on each device beside transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.request import RequestSpec
from engine.worker.process.worker import Worker
from tests.adapters.models import test_encoders as encoders
from tests.adapters.models import test_pooled_decoders as decoders
from tests.gpu.pairs import (
    GENTLE,
    PRECISIONS,
    TOLERANCE,
    error,
    gentle_model,
    pair_of,
    settings_on,
    shortfall,
    soften,
)
from tests.inline import play
from tests.models.encoders import describe_pooling, make_encoder
from tests.models.image_equality import GREEDY, WHOLE, prompts
from tests.models.images import IMAGE_ID, make_model

ON_EACH_DEVICE = pytest.mark.parametrize("device", PRECISIONS)
ALLOWED = TOLERANCE | {"cpu": 1e-4, "cuda": 5e-2}
VARIANTS = ("qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "gemma4_whole", "smolvlm")
NUM_TOKENS = 12
Record = Callable[[str, object], None]


@ON_EACH_DEVICE
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_behind_images(
    variant: str, device: str, tmp_path: Path, record_property: Record
) -> None:
    """Of several sizes, beside text and each other."""
    model = make_model(variant, scale=GENTLE)
    soften(model)
    model.save_pretrained(tmp_path)
    worker = Worker.load(settings_on(device, tmp_path), lambda *_: None)
    asked = prompts(variant)
    specs = [RequestSpec(each.tokens, NUM_TOKENS, GREEDY, media=each.media) for each in asked]
    worst = 0.0
    outcomes = play(worker, specs, max_batch_size=3, max_batch_tokens=WHOLE)
    for prompt, outcome in zip(asked, outcomes, strict=True):
        assert outcome.error is None
        output = tuple(outcome.tokens)
        logits = prompt.expected(model, output[:-1])[len(prompt.tokens) - 1 :].clone()
        logits[:, IMAGE_ID : IMAGE_ID + 2] = logits.min()  # `GREEDY` bans them
        worst = max(worst, shortfall(logits, output, 2 * ALLOWED[device]))
    record_property("shortfall", round(worst, 4))
    assert worst <= 1


@ON_EACH_DEVICE
@pytest.mark.parametrize("variant", ["bert", "modernbert"])
def test_embeddings_of_encoders(
    variant: str, device: str, tmp_path: Path, record_property: Record
) -> None:
    model = make_encoder(variant)
    model.save_pretrained(tmp_path)
    describe_pooling(tmp_path, "mean_tokens", normalizes=False)
    settings = settings_on(device, tmp_path, attention="auto")
    worker = Worker.load(settings, lambda *_: None)
    compare(
        decoders.vectors(worker, encoders.PROMPTS, **encoders.WHOLE),
        [encoders.states_of(model, prompt).mean(0) for prompt in encoders.PROMPTS],
        device,
        record_property,
    )


@ON_EACH_DEVICE
@pytest.mark.parametrize("family", ["qwen3", "mistral_window"])
def test_embeddings_of_decoders(
    family: str, device: str, tmp_path: Path, record_property: Record
) -> None:
    pair = pair_of(gentle_model(family), tmp_path, device, task="embed")
    wanted = [torch.from_numpy(decoders.expected(pair.model, each)) for each in decoders.PROMPTS]
    compare(decoders.vectors(pair.worker, **decoders.SMALL), wanted, device, record_property)


def compare(found: list[Any], wanted: list[Tensor], device: str, record: Record) -> None:
    pairs = zip(found, wanted, strict=True)
    worst = max(error(torch.from_numpy(np.array(one)), other) for one, other in pairs)
    record("largest error", round(worst, 4))
    assert worst < ALLOWED[device]
