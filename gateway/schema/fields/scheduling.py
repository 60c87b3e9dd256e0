"""Scheduling fields of a request: priority, deadlines, and the salt of its prefix cache entries.

Every policy accepts these fields and uses those it knows. `deadline_ms` applies under every policy.
"""

from typing import NamedTuple

import msgspec

from gateway.schema.decoding import check_allowed, check_range, invalid

DEFAULT_TIER = "default"
PRIORITY_OF_TIER = {  # lower runs first
    "auto": 0, "default": 0, "scale": 0, "flex": 10, "priority": -10, "fast": -10, "ultrafast": -20,
}  # fmt: skip
MAX_DEADLINE_MS = 86_400_000  # a day
INT64 = (-(2**63), 2**63 - 1)


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
