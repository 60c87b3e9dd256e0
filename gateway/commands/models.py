"""`podway models`: the models on this machine that `podway serve` can load without a download.

Folders and files that cannot be read, and links that lead nowhere, are left out.
"""

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from os.path import exists, isdir  # False for what may not be looked at, where Path's raise
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from engine.files import split_files
from gateway.settings.flags import Parser
from gateway.settings.model import BUILTIN_MODEL

WEIGHT_FILES = (".safetensors", ".gguf")


class LocalModel(NamedTuple):
    """A model on this machine: the name by which it is served, and its architecture."""

    name: str
    architecture: str
    num_bytes: int
    is_supported: bool


def parser() -> Parser:
    """The flags of `podway models`."""
    parser = Parser(
        "podway models",
        usage="podway models [DIR ...] [flags]",
        description="List the models on this machine: those in the cache of the Hugging Face hub, "
        "and those in directories.",
    )
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="look here, too")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    return parser


def main(argv: list[str]) -> int:
    """Print the models. Returns 1 if a directory does not exist."""
    args = parser().parse_args(argv)
    for directory in args.directories:
        if not directory.is_dir():
            sys.stderr.write(f"podway models: there is no directory {directory}\n")
            return 1
    models = [*hub_models(), *(model for each in args.directories for model in models_in(each))]
    if args.json:
        for model in models:
            sys.stdout.write(json.dumps(model._asdict()) + "\n")
        return 0
    table = Table("model", "architecture", "size", "")
    table.add_row(BUILTIN_MODEL, "comes with Podway", "", "")
    for model in sorted(models):
        note = "" if model.is_supported else "not supported"
        table.add_row(model.name, model.architecture, f"{model.num_bytes / 1e9:.2f} GB", note)
    Console().print(table)
    return 0


def hub_models() -> Iterator[LocalModel]:
    """The models in the cache of the hub, by their ids."""
    hub = importlib.import_module("huggingface_hub")
    try:
        repositories = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return
    for repository in repositories:
        for revision in repository.revisions:
            files = [each.file_path for each in revision.files]
            yield from _models(repository.repo_id, files, revision.snapshot_path)


def models_in(directory: Path) -> Iterator[LocalModel]:
    """The checkpoint in a directory, or those in the directories below it, and GGUF files."""
    folders = [directory, *sorted(each for each in _entries(directory) if isdir(each))]
    for folder in folders:
        yield from _models(str(folder), _entries(folder), folder)


def _entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing if it cannot be read, as `lost+found` of a volume."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _models(name: str, files: Iterable[Path], folder: Path) -> Iterator[LocalModel]:
    """The checkpoint of a folder with a config.json, and each of its GGUF files."""
    weights = [each for each in files if each.suffix in WEIGHT_FILES and exists(each)]
    checkpoint = [each for each in weights if each.suffix == ".safetensors"]
    if checkpoint and (folder / "config.json").is_file():
        architecture = _architecture(folder / "config.json")
        families = importlib.import_module("adapters.models").FAMILIES
        size = sum(each.stat().st_size for each in checkpoint)
        yield LocalModel(name, architecture or "unknown", size, architecture in families)
    others = {part for file in weights for part in split_files(file)[1:]}
    for file in weights:
        if file in others or file.suffix != ".gguf" or file.name.startswith("mmproj"):
            continue  # further files of a model, and image encoders
        path = str(file) if Path(name).exists() else f"{name}:{file.name}"
        size = sum(each.stat().st_size for each in split_files(file) if each.exists())
        yield LocalModel(path, "GGUF", size, is_supported=True)


def _architecture(config: Path) -> str | None:
    """The architecture that a config.json names; None if it names none."""
    try:
        value = json.loads(config.read_text(encoding="utf-8"))
        return str(value["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return None
