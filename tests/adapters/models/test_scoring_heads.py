import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine.errors import StartupError
from tests.adapters.models.test_encoders import PROMPTS, WHOLE
from tests.adapters.models.test_pooled_decoders import a_worker, vectors
from tests.models.checkpoints import SMALL, make_checkpoint, make_model
from tests.models.encoders import make_encoder

TOLERANCE = 1e-5


def logits_of(model: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


@pytest.mark.parametrize("variant", ["bert", "roberta", "xlm_roberta", "modernbert"])
@pytest.mark.parametrize("activation", ["Sigmoid", "Identity"])
def test_cross_encoders(tmp_path: Path, variant: str, activation: str) -> None:
    more = {"classifier_pooling": "mean"} if variant == "modernbert" else {}
    model = make_encoder(variant, "ForSequenceClassification", num_labels=1, **more)
    if activation == "Identity":
        path = f"torch.nn.modules.linear.{activation}"
        model.config.sentence_transformers = {"activation_fn": path}
    model.save_pretrained(tmp_path)
    worker = a_worker(tmp_path, "auto")
    assert worker.report.pooling is not None
    assert (worker.report.pooling.task, worker.report.pooling.size) == ("score", 1)
    for prompt, vector in zip(PROMPTS, vectors(worker, PROMPTS, **WHOLE), strict=True):
        expected = logits_of(model, prompt)
        if activation == "Sigmoid":
            expected = torch.sigmoid(expected)
        assert np.abs(vector - expected.numpy()).max() < TOLERANCE


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_decoders_with_a_classifier(tmp_path: Path, family: str) -> None:
    config = getattr(transformers, f"{family}Config")(**SMALL, num_labels=1)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    model.save_pretrained(tmp_path)
    worker = a_worker(tmp_path, "auto")
    for prompt, vector in zip(
        PROMPTS, vectors(worker, PROMPTS, max_batch_tokens=16, max_batch_size=4), strict=True
    ):
        expected = torch.sigmoid(logits_of(model, prompt)).numpy()
        assert np.abs(vector - expected).max() < TOLERANCE


@pytest.mark.parametrize("variant", ["qwen3", "qwen2_tied"])
@pytest.mark.parametrize("is_module", [True, False])
def test_the_logits_of_yes_and_no(tmp_path: Path, variant: str, is_module: bool) -> None:
    model = make_model(variant)
    make_checkpoint(tmp_path, variant)
    if is_module:
        modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
        kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
        modules.append({"idx": 1, "path": "1_LogitScore", "type": kind})
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_LogitScore").mkdir()
        ids = {"true_token_id": 11, "false_token_id": 5}
        (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    else:
        vocab = {"model": {"vocab": {"yes": 11, "no": 5}}}
        (tmp_path / "tokenizer.json").write_text(json.dumps(vocab))
    worker = a_worker(tmp_path, "auto" if is_module else "score")
    assert worker.report.pooling is not None
    assert "{document}" in worker.report.pooling.pair_template
    for prompt, vector in zip(PROMPTS, vectors(worker, PROMPTS), strict=True):
        logits = logits_of(model, prompt)[-1]
        expected = torch.sigmoid(logits[11] - logits[5]).item()
        assert abs(vector[0] - expected) < TOLERANCE


def test_a_base_model_saved_without_a_head_embeds(tmp_path: Path) -> None:
    model = make_model("qwen3").model
    model.save_pretrained(tmp_path)
    worker = a_worker(tmp_path, "auto")
    for prompt, vector in zip(PROMPTS, vectors(worker, PROMPTS), strict=True):
        with torch.inference_mode():
            last = model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(last, dim=0).numpy()
        assert np.abs(vector - expected).max() < TOLERANCE


def test_several_labels_are_rejected(tmp_path: Path) -> None:
    make_encoder("bert", "ForSequenceClassification", num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="3 labels"):
        a_worker(tmp_path, "auto")
