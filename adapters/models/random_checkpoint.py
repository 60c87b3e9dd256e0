"""`random:SHAPE`: a model of random weights, for measurements without a download.

It is a checkpoint directory without weights in the user's cache: config.json says that the weights
are random, the tokenizer and chat template are the built-in model's, and each id beyond that
vocabulary is a synthetic word.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from platformdirs import user_cache_path

from adapters.models.named_shapes import IMAGES, SHAPES, VISION_SHAPES
from engine.errors import StartupError

PREFIX = "random:"
COPIED = ("tokenizer_config.json", "generation_config.json")
_DIGITS = 12
# What the built-in chat template renders of a message's parts, and with images.
TEXT_PARTS = "for part in content if part.text is defined -%}{{- part.text -}}{%- endfor"
ALL_PARTS = (
    "for part in content -%}{%- if part.text is defined -%}{{- part.text -}}"
    "{%- elif part.type in ['image', 'image_url'] -%}IMAGE{%- endif -%}{%- endfor"
)


def config_of(name: str) -> dict[str, object]:
    """The config of a named shape or of a directory's config.json. Raises `StartupError`."""
    shapes = {**SHAPES, **VISION_SHAPES}
    if name in shapes:
        return dict(shapes[name])
    path = Path(name).expanduser() / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError:
        known = ", ".join(shapes)
        raise StartupError(
            f"unknown shape {name!r}; known: {known}, and directories with a config.json"
        ) from None
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object")
    return config


def random_checkpoint(name: str, cache: Path | None = None) -> Path:
    """The directory of `random:NAME`, created if it does not exist.

    Raises `StartupError` for an unknown shape or if the cache is not writable.
    """
    contents = _contents(config_of(name))
    digest = hashlib.sha256()
    for file, text in sorted(contents.items()):
        digest.update(f"{file}\0{text}\0".encode())
    folder = (cache or user_cache_path("podway", appauthor=False)) / "random"
    directory = folder / f"{Path(name).name}-{digest.hexdigest()[:_DIGITS]}"
    if not directory.is_dir():
        try:
            _write(contents, directory)
        except OSError as error:
            raise StartupError(
                f"{PREFIX}{name} needs a writable cache directory ({error}); "
                "set XDG_CACHE_HOME to another one"
            ) from error
    return directory


def _contents(config: dict[str, object]) -> dict[str, str]:
    """The text of each file of the directory, by name."""
    builtin = files("adapters").joinpath("builtin")
    tokenizer = json.loads(builtin.joinpath("tokenizer.json").read_text("utf-8"))
    text = {name: builtin.joinpath(name).read_text("utf-8") for name in COPIED}
    of_text, images = config.get("text_config", config), config.get(IMAGES, {})
    assert isinstance(of_text, dict), "the family has read it"
    assert isinstance(images, dict), "an object of a named shape"
    tokenizer["added_tokens"] += _special_tokens(images.get("tokens", {}))
    text["tokenizer.json"] = json.dumps(_with_all_ids(tokenizer, of_text.get("vocab_size")))
    if images:
        all_parts = ALL_PARTS.replace("IMAGE", images["text"])
        path = "tokenizer_config.json"
        text[path] = text[path].replace(_quoted(TEXT_PARTS), _quoted(all_parts))
    if "preprocessor" in images:
        text["preprocessor_config.json"] = json.dumps(images["preprocessor"])
    text["config.json"] = json.dumps(config | {"random_weights": True}, indent=2)
    return text


def _quoted(text: str) -> str:
    """How a JSON file has a text."""
    return json.dumps(text)[1:-1]


def _special_tokens(ids: Mapping[str, int]) -> list[dict[str, object]]:
    """Further special tokens of a tokenizer.json."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": ids[name], "content": name, **plain, "special": True} for name in ids]


def _with_all_ids(tokenizer: dict[str, object], vocab_size: object) -> dict[str, object]:
    """The tokenizer with a synthetic word for each further id of a model's vocabulary."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    assert isinstance(model, dict), "the built-in tokenizer.json"
    assert isinstance(added, list), "the built-in tokenizer.json"
    special = {token["id"] for token in added}
    first = max(model["vocab"].values()) + 1
    while first in special:
        first += 1
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < first:
        raise StartupError(
            f"config.json: vocab_size is {vocab_size!r}, expected at least {first}: "
            "random models use the built-in model's tokenizer"
        )
    names = {token["id"]: token["content"] for token in added if token["id"] >= first}
    words = {names.get(each, f"Ġw{each:x}"): each for each in range(first, vocab_size)}
    return {**tokenizer, "model": {**model, "vocab": model["vocab"] | words}}


def _write(contents: Mapping[str, str], directory: Path) -> None:
    """Write all files or none, also if several processes do so at once."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=directory.parent, suffix=".new"))
    try:
        for name, text in contents.items():
            (fresh / name).write_text(text, encoding="utf-8")
        os.rename(fresh, directory)
    except OSError:
        if not directory.is_dir():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
