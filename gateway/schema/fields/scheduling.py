"""Scheduling fields of a request: priority, deadlines, and what it leaves in the prefix cache.

Every policy accepts these fields and uses those it knows. `deadline_ms` applies under every policy.
"""

from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidRequest
from gateway.schema.decoding import check_allowed, check_range, invalid

DEFAULT_TIER = "default"
PRIORITY_OF_TIER = {  # lower runs first
    "auto": 0, "default": 0, "scale": 0, "flex": 10, "priority": -10, "fast": -10, "ultrafast": -20,
}  # fmt: skip
MAX_DEADLINE_MS = 86_400_000  # a day
INT64 = (-(2**63), 2**63 - 1)

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


class SchedulingParams(NamedTuple):
    """The fields of an engine `RequestSpec` that these become; deadlines are seconds."""

    priority: int = 0
    salt: str = ""
    ttft_deadline: float | None = None
    deadline: float | None = None
    is_background: bool = False


class SchedulingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`service_tier` is OpenAI's, `priority` and `cache_salt` are vLLM's, deadlines are Podway's.

    Deadlines are milliseconds after the request is accepted. `priority` overrides the tier.
    """

    service_tier: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    ttft_deadline_ms: float | None = None
    deadline_ms: float | None = None

    def check_scheduling(self) -> None:
        """Raise `InvalidRequest` for the first value that is not allowed."""
        if self.service_tier is not None:
            check_allowed(self.service_tier, "service_tier", tuple(PRIORITY_OF_TIER))
        check_range(self.priority, "priority", *INT64)
        check_range(self.ttft_deadline_ms, "ttft_deadline_ms", 1, MAX_DEADLINE_MS)
        check_range(self.deadline_ms, "deadline_ms", 1, MAX_DEADLINE_MS)
        if self.cache_salt == "":
            raise invalid(
                "cache_salt",
                "expected at least one character; omit the field to share cached prefixes "
                "with all requests that have no salt.",
            )

    @property
    def tier(self) -> str:
        """The tier that the response reports; `auto` is reported as `default`."""
        tier = self.service_tier or DEFAULT_TIER
        return DEFAULT_TIER if tier == "auto" else tier

    @property
    def scheduling_params(self) -> SchedulingParams:
        """The engine's scheduling parameters."""
        by_tier = PRIORITY_OF_TIER[self.tier]
        return SchedulingParams(
            priority=by_tier if self.priority is None else self.priority,
            salt=self.cache_salt or "",
            ttft_deadline=_seconds(self.ttft_deadline_ms),
            deadline=_seconds(self.deadline_ms),
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
