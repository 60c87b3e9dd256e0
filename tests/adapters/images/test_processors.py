"""Images are prepared as the checkpoints' own processors do it, to the bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapters.images.loading import load_processor
from adapters.images.processor import ImageProcessor, Settings, Tile
from adapters.images.qwen_vl import QwenVLProcessor, settings_of, smart_size
from adapters.images.smolvlm import SmolVLMProcessor
from engine.errors import StartupError
from engine.media import Pixels
from tests.adapters.images.pictures import QWEN, checkpoint, noise
from tests.models.images import numbers

SIZES = [(1, 1), (37, 53), (320, 240), (600, 150), (200, 1), (3, 500)]


def tiles(pieces: list[Any]) -> list[Tile]:
    return [piece for piece in pieces if isinstance(piece, Tile)]


def floats(processor: ImageProcessor, tile: Tile, family: str) -> Any:
    return numbers(Pixels(tile.levels, processor.values), family)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("patch", [14, 16])
def test_patches_equal_those_of_qwen_vl(tmp_path: Path, size: tuple[int, int], patch: int) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(patch_size=patch)
    ours = load_processor(checkpoint(tmp_path, theirs.to_dict()))
    image = noise(*size)
    expected = theirs(image)
    (tile,) = tiles(ours.process(image, 1 << 20))
    assert np.array_equal(floats(ours, tile, "qwen2_vl"), expected["pixel_values"])
    assert list(tile.grid) == list(expected["image_grid_thw"][0])
    assert tile.num_tokens == len(tile.levels) // 4


@pytest.mark.parametrize("size", [(320, 240), (600, 150), (1000, 777)])
def test_the_faster_processor_differs_by_two_levels_of_256_at_most(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    """It resizes by torchvision, which Podway does not need: skipped where it is missing."""
    pytest.importorskip("torchvision")
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    theirs = Qwen2VLImageProcessor(patch_size=16)
    ours = load_processor(checkpoint(tmp_path, theirs.to_dict()))
    (tile,) = tiles(ours.process(noise(*size), 1 << 20))
    fast = np.asarray(theirs(noise(*size), return_tensors="np")["pixel_values"])
    level = float(np.diff(ours.values).max())
    assert np.abs(floats(ours, tile, "qwen2_vl") - fast).max() < 2.01 * level


@pytest.mark.parametrize("size", SIZES)
def test_squares_equal_those_of_gemma_3(tmp_path: Path, size: tuple[int, int]) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    theirs = Gemma3ImageProcessorPil(size={"height": 224, "width": 224})
    ours = load_processor(checkpoint(tmp_path, theirs.to_dict()))
    image = noise(*size)
    (tile,) = tiles(ours.process(image, 256))
    assert np.array_equal(floats(ours, tile, "gemma3")[0], theirs(image)["pixel_values"][0])
    assert (tile.grid, tile.num_tokens) == ((1, 16, 16), 256)


@pytest.mark.parametrize("size", [(37, 53), (320, 240), (600, 150), (200, 1), (3, 500)])
@pytest.mark.parametrize("most", [70, 280])
def test_patches_equal_those_of_gemma_4(tmp_path: Path, size: tuple[int, int], most: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    theirs = Gemma4ImageProcessorPil(max_soft_tokens=most)
    ours = load_processor(checkpoint(tmp_path, theirs.to_dict()))
    image = noise(*size)
    expected = theirs(image)
    (tile,) = tiles(ours.process(image, 1 << 20))
    values = expected["pixel_values"][0][: len(tile.levels)]
    assert np.array_equal(floats(ours, tile, "gemma4"), values)
    assert tile.num_tokens == expected["num_soft_tokens_per_image"][0]
    assert tile.grid[1] * tile.grid[2] == (expected["image_position_ids"][0][:, 0] >= 0).sum()
    (smaller,) = tiles(ours.process(image, 40))
    assert smaller.num_tokens <= 40


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [True, False])
def test_tiles_and_texts_equal_those_of_smolvlm(size: tuple[int, int], splits: bool) -> None:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    theirs = SmolVLMImageProcessorPil(
        size={"longest_edge": 512},
        max_image_size={"longest_edge": 128},
        do_image_splitting=splits,
        return_row_col_info=True,
    )
    ours = SmolVLMProcessor(Settings(theirs.to_dict(), {"image_seq_len": 4}, {}))
    image = noise(*size)
    pieces = ours.process(image, 1 << 20)
    expected = theirs(image)
    values = np.array(expected["pixel_values"])[0]
    read = [floats(ours, tile, "smolvlm") for tile in tiles(pieces)]
    assert np.array_equal(np.concatenate(read), values)
    text = "".join(p if isinstance(p, str) else "<image>" * p.num_tokens for p in pieces)
    places = expected["rows"][0][0], expected["cols"][0][0]
    marks = ("<fake_token_around_image>", "<image>", "<global-img>")
    assert text == get_image_prompt_string(*places, 4, *marks)


def test_too_few_tokens_make_an_image_smaller() -> None:
    qwen = QwenVLProcessor(Settings(QWEN, {}, {}))
    (tile,) = tiles(qwen.process(noise(640, 480), 1 << 20))
    assert tile.num_tokens == 300
    (tile,) = tiles(qwen.process(noise(640, 480), 100))
    assert 80 <= tile.num_tokens <= 100
    smol = SmolVLMProcessor(
        Settings({"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 128}}, {}, {})
    )
    assert len(tiles(smol.process(noise(640, 480), 1 << 20))) == 13
    assert len(tiles(smol.process(noise(640, 480), 256))) == 1


def test_sizes_equal_those_of_qwen_vl_over_many_shapes() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    random = np.random.default_rng(1)
    for height, width in random.integers(1, 5000, (500, 2)).tolist():
        if max(height, width) <= 200 * min(height, width):
            bounds = (28, 3136, 1003520)
            assert smart_size(height, width, *bounds) == smart_resize(height, width, *bounds)


def test_a_checkpoint_without_image_settings_has_those_of_its_family(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_5", "vision_config": {"patch_size": 16}}
    assert settings_of(config)["image_mean"] == [0.5, 0.5, 0.5]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tile,) = tiles(load_processor(tmp_path).process(noise(512, 512), 1 << 20))
    assert (tile.grid, tile.num_tokens) == ((1, 32, 32), 256)
    assert tile.levels.shape == (1024, 3, 16 * 16)


def test_an_unknown_image_processor_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="the image processor MiniImageProcessor is not"):
        load_processor(checkpoint(tmp_path, {"image_processor_type": "MiniImageProcessor"}))
    with pytest.raises(StartupError, match=r"\(none\) is not supported"):
        load_processor(checkpoint(tmp_path, {"size": 3}))
