"""Prompt cache fields of a request: what it leaves in the prefix cache, and where others go on."""

from typing import Any

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed

MODES = ("implicit", "explicit")
# Seconds. 5m and 1h are Anthropic's, 24h is `prompt_cache_retention`'s.
TTLS = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0, "24h": 86400.0}
RETENTIONS = ("in_memory", "in-memory", "24h")
ANTHROPIC_TTLS = ("5m", "1h")  # values of `cache_control`, the default first
BREAKPOINT = {"mode": "explicit"}
MAX_BREAKPOINTS = 4  # the latest ones of a prompt


class PromptCacheOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's options.

    With `mode` "explicit" the cache keeps nothing behind the last breakpoint of the prompt. With
    `prewarm` the prompt is computed, in the background, and no output. For `ttl` what the request
    leaves in the cache is evicted after all that has no such time, in every tier.
    """

    mode: str | None = None
    ttl: str | None = None
    prewarm: bool | None = None
    comparison_response_id: str | None = None

    @property
    def seconds(self) -> float:
        """The seconds of `ttl`; 0 without one."""
        return 0.0 if self.ttl is None else TTLS[self.ttl]

    def check(self, *, compares: bool = False) -> None:
        """Raise `InvalidRequest` for the first invalid field; only the Responses API `compares`."""
        path = "prompt_cache_options"
        if self.mode is not None:
            check_allowed(self.mode, f"{path}.mode", MODES)
        if self.ttl is not None:
            check_allowed(self.ttl, f"{path}.ttl", tuple(TTLS))
        if self.comparison_response_id is not None and not compares:
            param = f"{path}.comparison_response_id"
            raise InvalidRequest(f"'{param}' is only supported in /v1/responses.", param)


def check_breakpoint(given: Any, path: str) -> None:
    """Raise `InvalidRequest` unless it is None or OpenAI's `prompt_cache_breakpoint`."""
    if given is not None and given != BREAKPOINT:
        raise InvalidRequest(f'Invalid \'{path}\': expected {{"mode": "explicit"}}.', path)
