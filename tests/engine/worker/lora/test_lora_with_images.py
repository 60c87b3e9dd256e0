from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.models.checks.adapter import check_adapter
from engine.errors import StartupError
from engine.lora import LoraAdapter, LoraSpec
from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.weights.headers import read_headers
from tests.engine.worker.process.driving import load_worker
from tests.inline import play
from tests.models.images import Prompt, make_checkpoint, make_model, picture
from tests.models.loras import adapted

GREEDY = SamplingParams(temperature=0.0)
OF_TEXT = r".*(language_model|text_model).*\.(q_proj|o_proj|down_proj)"
ENCODERS = {"qwen3_vl": "linear_fc1", "qwen2_5_vl": "qkv", "gemma3": "q_proj", "smolvlm": "fc2"}


@pytest.mark.parametrize("variant", ["qwen3_vl", "qwen2_5_vl", "gemma3", "smolvlm"])
def test_an_adapter_of_the_decoder_gives_the_text_of_peft_behind_an_image(
    tmp_path: Path, variant: str
) -> None:
    directory = make_checkpoint(tmp_path / "base", variant)
    model = adapted(make_model(variant), target_modules=OF_TEXT)
    model.save_pretrained(tmp_path / "lora")
    check_adapter("one", tmp_path / "lora", read_headers(directory), 16)
    worker = load_worker(directory)
    report = worker.load_lora(LoraSpec(1, "one", str(tmp_path / "lora")))
    assert not report.error
    prompt = Prompt.of([5, 6, 92], picture(variant, 4, 6), [93, 7, 8])
    lora = LoraAdapter(1, "one", report.digest)
    specs = [
        RequestSpec(prompt.tokens, 6, GREEDY, media=prompt.media, lora=each, logprobs=0)
        for each in (None, lora)
    ]
    plain, changed = play(worker, specs)
    output = tuple(changed.tokens)
    assert changed.logprobs[0].logprob != plain.logprobs[0].logprob
    logits = prompt.expected(_Named(model), output[:-1])[len(prompt.tokens) - 1 :]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0]
    found = torch.tensor([each.logprob for each in changed.logprobs])
    assert (found - expected).abs().max().item() < 5e-4


class _Named:
    """PEFT's model with the config of transformers' model."""

    def __init__(self, model: Any) -> None:
        self.config = model.base_model.model.config
        self._model = model

    def __call__(self, *args: Any, **given: Any) -> Any:
        return self._model(*args, **given)


@pytest.mark.parametrize("variant", ENCODERS)
def test_an_adapter_of_the_encoder_is_refused_with_the_name_of_its_tensor(
    tmp_path: Path, variant: str
) -> None:
    directory = make_checkpoint(tmp_path / "base", variant)
    target = rf".*(visual|vision).*\.{ENCODERS[variant]}"
    adapted(make_model(variant), target_modules=target).save_pretrained(tmp_path / "lora")
    named = r"tensor \S+\.vis\S+: LoRA on an image encoder is not supported"
    with pytest.raises(StartupError, match=named):
        check_adapter("one", tmp_path / "lora", read_headers(directory), 16)
    report = load_worker(directory).load_lora(LoraSpec(1, "one", str(tmp_path / "lora")))
    assert "LoRA on an image encoder is not supported" in report.error
