"""Settings of LoRA adapters."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import BaseSettings, NoDecode

from gateway.settings.options import option as _option
from gateway.settings.options import split


def _named_paths(values: tuple[str, ...]) -> tuple[str, ...]:
    names = [value.partition("=")[0] for value in values]
    if not all(value.partition("=")[2] and name for value, name in zip(values, names, strict=True)):
        raise ValueError("--lora must be NAME=PATH, with the directory of a LoRA adapter")
    if len(set(names)) < len(names):
        raise ValueError("--lora has the same name twice")
    return values


class LoraSettings(BaseSettings):
    """The fields about LoRA under `model` of `podway serve --help`."""

    lora: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(split), AfterValidator(_named_paths)
    ] = _option(
        (),
        "model",
        "a LoRA adapter in PEFT's format and the model name under which it is served; the flag can "
        "be repeated, or have several adapters separated by commas",
        "NAME=PATH",
    )
    max_loras: int = _option(
        8, "model", "maximum LoRA adapters that are loaded at once", "N", ge=1, le=4096
    )
    max_lora_rank: int = _option(
        64, "model", "maximum rank of a LoRA adapter", "RANK", ge=1, le=4096
    )
