"""Checks of the model's files before a worker starts: an error within a second.

Adapters are imported here, by name.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from typing import cast

from engine.errors import StartupError
from gateway.serve.saved import tokenizers_folder
from gateway.settings.model import BUILTIN_MODEL
from gateway.settings.settings import Settings

RESOLVE = "adapters.models.checkpoint:resolve_checkpoint"
CHECKPOINT = "adapters.models.checks.checkpoint:check_checkpoint"
TOKENIZER = "adapters.tokenizers.checks:check_tokenizer"
FIND_PROJECTOR = "adapters.gguf:find_mmproj"
NO_PROJECTOR = "off"
TEXT_TASKS = ("embed", "score")  # no encoder is looked for with these
ADAPTER = "adapters.models.checks.adapter:check_adapter"


def check_local_model(settings: Settings) -> None:
    """Check the model, its adapters and its draft model, unless they have to be downloaded first.
    Raises `StartupError`."""
    if is_local(settings.model.source):
        check_model(settings, model_directory(settings.model.source))


def check_model(settings: Settings, directory: Path) -> None:
    """Check the model in `directory`, its adapters and its draft model. Raises `StartupError`."""
    mmproj = projector_file(settings, directory)
    headers = resolve_name(CHECKPOINT)(directory, settings.model.max_model_len, mmproj)
    if directory.is_dir():
        resolve_name(TOKENIZER)(directory, tokenizers_folder(settings.schedule.cache_dir))
    _check_loras(settings, headers)
    speculation = settings.model.speculative_config
    if speculation is not None and speculation.model and is_local(speculation.model):
        resolve_name(CHECKPOINT)(model_directory(speculation.model), 0)


def is_local(source: str) -> bool:
    """Whether the model is on this machine, so that nothing is downloaded."""
    if source == BUILTIN_MODEL or source.startswith("random:"):
        return True
    return Path(source).expanduser().exists()


def model_directory(source: str) -> Path:
    """The directory or GGUF file of a model, downloaded or created if necessary. Raises
    `StartupError`."""
    if source == BUILTIN_MODEL:
        return Path(str(files("adapters").joinpath("builtin")))
    return cast("Path", resolve_name(RESOLVE)(source))


def projector_file(settings: Settings, directory: Path) -> Path | None:
    """The file of the image encoder of a GGUF model; None without one. Raises `StartupError`."""
    given = settings.model.mmproj
    if directory.is_dir() and given not in ("", NO_PROJECTOR):
        raise StartupError(
            f"--mmproj {given} is for models in GGUF files; {directory} has its own image encoder, "
            "if it has one"
        )
    if directory.is_dir() or given == NO_PROJECTOR:
        return None
    if not given and settings.model.task in TEXT_TASKS:
        return None
    if not given:
        return cast("Path | None", resolve_name(FIND_PROJECTOR)(directory))
    path = model_directory(given)
    if path.is_dir():
        raise StartupError(f"--mmproj {given} is a directory, not a GGUF file")
    return path


def _check_loras(settings: Settings, headers: Mapping[str, object]) -> None:
    if settings.launch.launcher != "local":
        return  # the directories are on the workers' machines
    for value in settings.loras.lora:
        name, _, path = value.partition("=")
        directory = Path(path).expanduser()
        resolve_name(ADAPTER)(name, directory, headers, settings.loras.max_lora_rank)
