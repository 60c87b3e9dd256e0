"""The JSON documents of a Hugging Face directory, built from a GGUF file."""

from collections.abc import Callable
from pathlib import Path

from adapters.gguf import projector
from adapters.gguf.config import read_config
from adapters.gguf.file import GgufFile
from adapters.gguf.vocabulary import CONTROL, USER_DEFINED, read_tokenizer, special_tokens

SPECIAL = ("bos", "eos", "unknown", "padding")
ENDS = ("eos", "eot", "eom")
# Control tokens with these texts end an output even if the metadata names only one end token.
ENDING_TEXTS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
}
TEMPLATE = "tokenizer.chat_template"


def read_document(path: Path, name: str) -> dict[str, object]:
    """A document by its file name; empty if there is none. Raises `StartupError`."""
    file = GgufFile(path)
    if projector.is_projector(file):
        return projector.read_document(file, name)
    reads = DOCUMENTS.get(name)
    return {} if reads is None else reads(file)


def _generation(file: GgufFile) -> dict[str, object]:
    named = (file.integer(f"tokenizer.ggml.{end}_token_id") for end in ENDS)
    ends = [place for place in named if place is not None]
    kinds = enumerate(file.numbers("tokenizer.ggml.token_type"))
    added = (place for place, kind in kinds if kind in (CONTROL, USER_DEFINED))
    texts = file.texts_at("tokenizer.ggml.tokens", added)
    ends += [place for place, text in texts.items() if text in ENDING_TEXTS and place not in ends]
    return {"eos_token_id": ends}


def _tokenizer_config(file: GgufFile) -> dict[str, object]:
    names = {"unknown": "unk", "padding": "pad"}
    texts = special_tokens(file, SPECIAL)
    config: dict[str, object] = {
        f"{names.get(name, name)}_token": texts.get(name) for name in SPECIAL
    }
    template = file.text(TEMPLATE)
    others = [key for key in file.keys if key.startswith(f"{TEMPLATE}.")]
    if not others:
        return config | {"chat_template": template}
    templates = [
        {"name": key.removeprefix(f"{TEMPLATE}."), "template": file.text(key)} for key in others
    ]
    if template is not None:
        templates.insert(0, {"name": "default", "template": template})
    return config | {"chat_template": templates}


DOCUMENTS: dict[str, Callable[[GgufFile], dict[str, object]]] = {
    "config.json": read_config,
    "generation_config.json": _generation,
    "tokenizer.json": read_tokenizer,
    "tokenizer_config.json": _tokenizer_config,
}
