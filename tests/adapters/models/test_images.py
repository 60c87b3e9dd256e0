"""Models with image encoders give transformers' logits, however image and prompt are split."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.request import RequestSpec
from engine.step import SamplingParams
from engine.worker.process.worker import Worker
from tests.engine.worker.process.driving import load_worker
from tests.inline import play
from tests.models.images import IMAGE_ID, VARIANTS, Prompt, make_checkpoint, make_model, picture

NO_IMAGES = ((IMAGE_ID, -100.0), (IMAGE_ID + 1, -100.0))  # transformers reads them as images
ON_REFERENCE = ("gemma3", "qwen3_5")  # also computed by the reference attention
WHOLE = 37  # tokens of the largest image beside two decodes
GREEDY = SamplingParams(temperature=0.0, logit_bias=NO_IMAGES)


def prompts(variant: str) -> list[Prompt]:
    """Text around one image and several."""
    some, other = picture(variant, 4, 6), picture(variant, 6, 4, seed=1)
    return [
        Prompt.of([5, 6, 92], some, [93, 7, 8]),
        Prompt.of(other, [9], some, [10, 11, 12]),
        Prompt.of([1, 2, 3, 4, 5, 6, 7], picture(variant, 2, 2, seed=2), [8]),
        Prompt.of([16, 17], picture(variant, 10, 14, seed=3), [18, 19]),  # in several tiles
        Prompt.of([12, 13, 14, 15]),
    ]


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and in a worker."""

    model: Any
    worker: Worker
    prompts: list[Prompt]


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    variant = str(request.param)
    return variant, make_model(variant), make_checkpoint(tmp_path_factory.mktemp(variant), variant)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def pair(request: pytest.FixtureRequest, checkpoint: Any) -> Pair:
    variant, model, directory = checkpoint
    if request.param == "reference" and variant not in ON_REFERENCE:
        pytest.skip("its attention is one of the others'")
    worker = load_worker(directory, attention=str(request.param))
    return Pair(model, worker, prompts(variant))


@pytest.mark.parametrize("max_tokens", [3, 64])
def test_outputs_and_log_probabilities_are_transformers(pair: Pair, max_tokens: int) -> None:
    specs = [
        RequestSpec(each.tokens, 12, GREEDY, media=each.media, logprobs=0) for each in pair.prompts
    ]
    assert pair.worker.report.encoder is not None
    if pair.worker.report.encoder.is_whole:
        max_tokens = max(max_tokens, WHOLE)
    outcomes = play(pair.worker, specs, max_batch_size=3, max_batch_tokens=max_tokens)
    for prompt, outcome in zip(pair.prompts, outcomes, strict=True):
        assert outcome.error is None
        output = tuple(outcome.tokens)
        logits = prompt.expected(pair.model, output[:-1])[len(prompt.tokens) - 1 :]
        scores = torch.log_softmax(logits, -1)
        logits[:, IMAGE_ID : IMAGE_ID + 2] -= 100.0
        assert output == tuple(logits.argmax(-1).tolist())
        expected = scores.gather(1, torch.tensor(output)[:, None])[:, 0]
        found = torch.tensor([each.logprob for each in outcome.logprobs])
        assert (found - expected).abs().max().item() < 5e-4


@pytest.mark.parametrize("root", ["vision_tower.vision_model.", "model.vision_tower."])
def test_gemmas_tower_is_found_under_the_names_of_all_checkpoints(
    tmp_path: Path, root: str
) -> None:
    path = make_checkpoint(tmp_path, "gemma3") / "model.safetensors"
    tensors = load_file(path)
    expected = load_worker(tmp_path).report
    save_file({name.replace("vision_tower.", root): each for name, each in tensors.items()}, path)
    found = load_worker(tmp_path).report
    assert found.encoder == expected.encoder is not None
    assert found.num_parameters == expected.num_parameters


def test_the_flat_config_of_published_qwen_2_5_is_read(tmp_path: Path) -> None:
    """The decoder's fields lie beside `vision_config`, and RoPE has an older type."""
    make_checkpoint(tmp_path, "qwen2_5_vl")
    prompt = prompts("qwen2_5_vl")[1]
    specs = [RequestSpec(prompt.tokens, 12, GREEDY, media=prompt.media)]
    (expected,) = play(load_worker(tmp_path), specs)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    del text["model_type"], text["layer_types"]
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    vision = {**config["vision_config"], "in_chans": config["vision_config"].pop("in_channels")}
    flat = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    path.write_text(json.dumps({**flat, "vision_config": vision}))
    (outcome,) = play(load_worker(tmp_path), specs)
    assert outcome.error is None
    assert outcome.tokens == expected.tokens
