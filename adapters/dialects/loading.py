"""Loads the chat template of a checkpoint from the files in which Hugging Face stores it."""

import logging
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from adapters.dialects.jinja_template import JinjaTemplate
from adapters.gguf import is_gguf, read_document
from engine.errors import InvalidRequest, StartupError

logger = logging.getLogger(__name__)

CHATML = """{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content or '' }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def load_chat_template(directory: Path, instead: Path | None = None) -> JinjaTemplate | None:
    """The chat template of the checkpoint in `directory`; None if it has none.

    The first of these is used: the Jinja file `instead`; `chat_template.jinja` with
    `additional_chat_templates/*.jinja`; `chat_template` of `tokenizer_config.json`; for a GGUF file
    ChatML, as in llama.cpp.
    Raises `StartupError` for a file that cannot be read or a template that does not compile. One
    that fails for a short message is logged: completions need none.
    """
    config = _object(directory / "tokenizer_config.json")
    files = _files(directory) if instead is None else {"default": instead}
    sources = _read(files) or _configured(config.get("chat_template"), directory)
    if not sources and directory.is_file():
        logger.warning(
            "%s has no chat template: chats are formatted as ChatML; give the right one with "
            "--chat-template",
            directory,
        )
        sources = {"default": CHATML}
    if not sources:
        return None
    older = _object(directory / "special_tokens_map.json")
    template = JinjaTemplate(sources, _special_tokens(older) | _special_tokens(config))
    config_file = directory if directory.is_file() else directory / "tokenizer_config.json"
    _try(template, files.get("default", config_file))
    return template


def _try(template: JinjaTemplate, file: Path) -> None:
    try:
        template.render([{"role": "user", "content": "Hello!"}])
    except InvalidRequest as error:
        frames = traceback.extract_tb(error.__cause__.__traceback__ if error.__cause__ else None)
        lines = [f", line {each.lineno}" for each in frames if each.filename == "<template>"]
        logger.warning(
            "%s: the chat template%s fails for a short message: %s Chats will be rejected with "
            "this error, completions are served; give another template with --chat-template",
            file,
            "".join(lines[-1:]),
            " ".join(str(error).split()).rstrip(".") + ".",
        )


def _object(path: Path) -> Mapping[str, Any]:
    if is_gguf(path.parent) and path.parent.is_file():
        return read_document(path.parent, path.name)
    try:
        data = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, orjson.JSONDecodeError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise StartupError(f"{path} is not a JSON object")
    return data


def _files(directory: Path) -> dict[str, Path]:
    paths = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    main = directory / "chat_template.jinja"
    return paths | ({"default": main} if main.exists() else {})


def _read(paths: Mapping[str, Path]) -> dict[str, str]:
    try:
        return {name: path.read_text("utf-8") for name, path in paths.items()}
    except OSError as error:
        raise StartupError(f"a chat template cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        paths_read = ", ".join(map(str, paths.values()))
        raise StartupError(f"a chat template is not UTF-8: {paths_read}") from error


def _configured(template: object, directory: Path) -> dict[str, str]:
    match template:
        case None:
            return {}
        case str():
            return {"default": template}
        case [*entries]:
            named = [found for entry in entries if (found := _named(entry)) is not None]
            if len(named) == len(entries):
                return dict(named)
    raise StartupError(
        f"{directory / 'tokenizer_config.json'}: chat_template must be a string "
        "or a list of named templates"
    )


def _named(entry: object) -> tuple[str, str] | None:
    match entry:
        case {"name": str(name), "template": str(template)}:
            return name, template
    return None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text of `bos_token`, `eos_token`, …; those that are null are left out."""
    tokens: dict[str, Any] = {}
    for name, value in config.items():
        text = _text(value)
        if name.endswith("_token") and text is not None:
            tokens[name] = text
        elif name == "additional_special_tokens" and isinstance(value, list):
            tokens[name] = [text for entry in value if (text := _text(entry)) is not None]
    return tokens


def _text(value: object) -> str | None:
    match value:
        case str():
            return value
        case {"content": str(content)}:
            return content
    return None
