import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.request import RequestSpec
from engine.worker.weights.checkpoint import Checkpoint
from tests.engine.worker.process.driving import load_worker
from tests.inline import play
from tests.models.image_equality import GREEDY, MAX_TOKENS, Family, prompts
from tests.models.images import VARIANTS, make_checkpoint, make_model

ON_REFERENCE = ("gemma3", "qwen3_5")  # also computed by the reference attention


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    variant = str(request.param)
    return variant, make_model(variant), make_checkpoint(tmp_path_factory.mktemp(variant), variant)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def family(request: pytest.FixtureRequest, checkpoint: Any) -> Family:
    variant, model, directory = checkpoint
    if request.param == "reference" and variant not in ON_REFERENCE:
        pytest.skip("its attention is one of the others'")
    worker = load_worker(directory, attention=str(request.param))
    return Family(model, Checkpoint.open(str(directory)), worker)


@pytest.mark.parametrize("max_tokens", MAX_TOKENS)
def test_outputs_and_log_probabilities_are_transformers(
    family: Family, checkpoint: Any, max_tokens: int
) -> None:
    family.compare_outputs(prompts(checkpoint[0]), max_tokens)
    assert family.scores.largest < 5e-4


def test_encodings_and_positions_are_transformers(checkpoint: Any) -> None:
    variant, model, directory = checkpoint
    family = Family(model, Checkpoint.open(str(directory)))
    for prompt in prompts(variant)[:4]:
        family.compare_encodings(prompt)
    assert family.outputs.largest < 5e-5
    assert family.positions.largest == 0
    assert family.outputs.count
    assert family.positions.count or "qwen" not in variant


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
