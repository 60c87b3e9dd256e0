"""Resolves a model's name to its directory and reads its JSON files. Does not import torch.

A name is a directory, a GGUF file, `random:SHAPE`, a hub id or `org/name:FILE.gguf`. Only config,
safetensors and tokenizer files are downloaded from the hub (`adapters.models.hub`), or the one GGUF
file.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from adapters.gguf import is_gguf, read_document, read_joined
from adapters.models.random_checkpoint import PREFIX, random_checkpoint
from engine.errors import StartupError


def resolve_checkpoint(model: str) -> Path:
    """The directory of a model, downloaded or created if necessary. Raises `StartupError`."""
    if model.startswith(PREFIX):
        return random_checkpoint(model.removeprefix(PREFIX))
    directory = Path(model).expanduser()
    if not directory.is_dir():
        if directory.exists() and not is_gguf(directory):
            raise StartupError(f"{model} is a file, not a checkpoint directory or *.gguf")
        directory = directory if directory.exists() else _download(model)
    if is_gguf(directory) and directory.is_file():
        return directory
    if not (directory / "config.json").is_file():
        is_adapter = (directory / "adapter_config.json").is_file()
        why = ": it is a LoRA adapter; serve its base model with --lora NAME=DIR" * is_adapter
        raise StartupError(f"{directory} has no config.json{why}")
    return directory


def _download(model: str) -> Path:
    """The downloaded checkpoint of a hub id, by a library that takes 0.4 s to import."""
    download = importlib.import_module("adapters.models.hub").download
    return cast("Callable[[str], Path]", download)(model)


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file; empty if the file does not exist. Raises `StartupError`."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} is not a JSON object")
    return value


MODELOPT_FILE = "hf_quant_config.json"  # older versions of ModelOpt do not change config.json


def read_config(directory: Path, mmproj: Path | None = None) -> dict[str, object]:
    """config.json of a checkpoint; for a GGUF file it is built from the metadata, with that of the
    file of its image encoder, if there is one."""
    if mmproj is not None:
        return read_joined(directory, mmproj)
    config, apart = _document(directory, "config.json"), directory / MODELOPT_FILE
    if "quantization_config" not in config and apart.is_file():
        scheme = read_json(apart).get("quantization")
        if isinstance(scheme, dict):
            config["quantization_config"] = {"quant_method": "modelopt", **scheme}
    return config


def read_generation_config(directory: Path) -> dict[str, object]:
    """generation_config.json of a checkpoint; empty if it has none."""
    return _document(directory, "generation_config.json")


def _document(checkpoint: Path, name: str) -> dict[str, object]:
    if is_gguf(checkpoint) and checkpoint.is_file():
        return read_document(checkpoint, name)
    return read_json(checkpoint / name)


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """The end token ids of generation_config.json, else of config.json; may be empty."""
    for name in ("generation_config.json", "config.json"):
        value = _document(directory, name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return tuple(value)
        if value is not None and value != []:
            raise StartupError(f"{name}: eos_token_id is {value!r}, expected ids")
    return ()
