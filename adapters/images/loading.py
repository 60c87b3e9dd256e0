"""The image processor of a checkpoint, from the files beside its weights."""

import json
from importlib import import_module
from pathlib import Path
from typing import cast

from adapters.gguf import is_gguf, read_document
from adapters.images import PROCESSORS
from adapters.images.processor import Config, ImageProcessor, Settings, section
from adapters.images.qwen_vl import settings_of
from engine.errors import StartupError

_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def load_processor(directory: Path) -> ImageProcessor:
    """The image processor of the checkpoint in `directory`, or of an mmproj file. Raises
    `StartupError`."""
    settings = read_settings(directory)
    name = str(settings.image.get("image_processor_type", "")).removesuffix("Fast")
    target = PROCESSORS.get(name)
    if target is None:
        raise StartupError(
            f"{directory}: the image processor {name or '(none)'} is not supported; supported are "
            + ", ".join(PROCESSORS)
        )
    module, _, class_name = target.partition(":")
    try:
        return cast("ImageProcessor", getattr(import_module(module), class_name)(settings))
    except (TypeError, ValueError) as error:
        raise StartupError(f"{directory}: the settings of its image processor: {error}") from error


def read_settings(directory: Path) -> Settings:
    """The files about images; a checkpoint of a family with known defaults may have none."""
    processor, model = _read(directory, "processor_config"), _read(directory, "config")
    image = section(processor, "image_processor") or _read(directory, "preprocessor_config")
    if not image and model.get("model_type") in _QWEN:
        image = settings_of(model)
    return Settings(image, processor, model)


def _read(directory: Path, name: str) -> Config:
    path = directory / f"{name}.json"
    if is_gguf(directory) and directory.is_file():
        return read_document(directory, path.name)
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object")
    return value
