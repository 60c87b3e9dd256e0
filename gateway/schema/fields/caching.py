"""Prompt cache fields of a request: what it leaves in the prefix cache, and where others go on."""

from typing import Any, Protocol

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed
from gateway.schema.unknown_fields import UnknownFields

MODES = ("implicit", "explicit")
TTLS = ("30m", "12h")
BREAKPOINT = {"mode": "explicit"}
MAX_BREAKPOINTS = 4  # the latest ones of a prompt


class PromptCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's options.

    With `mode` "explicit" the cache keeps nothing behind the last breakpoint of the prompt. With
    `prewarm` the prompt is computed, in the background, and no output. `ttl` has no effect: blocks
    stay as long as there is room for them in a tier.
    """

    mode: str | None = None
    ttl: str | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None

    def check(self, *, compares: bool = False) -> None:
        """Raise `InvalidRequest` for the first invalid field; only the Responses API `compares`."""
        path = "prompt_cache_options"
        if self.mode is not None:
            check_allowed(self.mode, f"{path}.mode", MODES)
        if self.ttl is not None:
            check_allowed(self.ttl, f"{path}.ttl", TTLS)
        if self.comparison_response_id is not None and not compares:
            param = f"{path}.comparison_response_id"
            raise InvalidRequest(f"'{param}' is only supported in /v1/responses.", param)


class HasCacheFields(Protocol):
    """A request with the fields of OpenAI's prompt cache."""

    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    prompt_cache_options: PromptCacheOptions | None


def name_without_effect(request: HasCacheFields, unknown: UnknownFields | None) -> None:
    """Name the given fields that change nothing: prefixes are found without a key, and are kept
    as long as there is room."""
    if unknown is None:
        return
    for name in ("prompt_cache_key", "prompt_cache_retention"):
        if getattr(request, name) is not None:
            unknown.ignore(name)
    options = request.prompt_cache_options
    if options is not None and options.ttl is not None:
        unknown.ignore("prompt_cache_options.ttl")


def check_breakpoint(given: Any, path: str) -> None:
    """Raise `InvalidRequest` unless it is None or OpenAI's `prompt_cache_breakpoint`."""
    if given is not None and given != BREAKPOINT:
        raise InvalidRequest(f'Invalid \'{path}\': expected {{"mode": "explicit"}}.', path)
