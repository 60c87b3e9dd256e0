"""`prompt_cache_diagnostics`: where a response's prompt leaves that of an earlier response."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.schema.rendering import Usage

Json = dict[str, Any]

# Fields of a response that change its prompt from the beginning on.
_SETTINGS = (("model", "model_changed"), ("tools", "tools_changed"))


class CacheDiagnosis:
    """Compares the chat messages of two responses.

    `note` is called with the tokens of the prompt up to the end of each message.
    """

    def __init__(self, reason: str | None, num_common: int, *, is_continued: bool) -> None:
        """`reason` is a setting that has changed; the first `num_common` messages are equal, and
        these are all of the earlier response if this one `is_continued` from it."""
        self._reason = reason
        self._num_common = num_common
        self._is_continued = is_continued
        self._message_ends: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        earlier: Mapping[str, Any],
        head: Mapping[str, Any],
        messages: Sequence[Json],
        others: Sequence[Json],
    ) -> "CacheDiagnosis":
        """The diagnosis of a response with the fields of `head` and the messages `others`, against
        an earlier response and its `messages`."""
        reason = next((name for key, name in _SETTINGS if earlier.get(key) != head.get(key)), None)
        if reason is None and _effort(earlier) != _effort(head):
            reason = "reasoning_effort_changed"
        pairs = enumerate(zip(messages, others, strict=False))
        differing = (place for place, (one, other) in pairs if one != other)
        num_common = next(differing, min(len(messages), len(others)))
        return cls(reason, num_common, is_continued=num_common == len(messages))

    def note(self, message_ends: Sequence[int]) -> None:
        """The prompt has been rendered."""
        self._message_ends = message_ends

    def as_json(self, usage: Usage) -> Json:
        """The diagnosis of a response with this usage. `message` is the first that differs."""
        if self._reason is None and self._is_continued:
            return {"type": "cache_hit" if usage.cached_tokens else "unavailable"}
        num_equal = 0 if self._reason else min(self._num_common, len(self._message_ends))
        reusable = self._message_ends[num_equal - 1] if num_equal else 0
        miss: Json = {
            "type": "cache_miss",
            "reason": self._reason or "input_changed",
            "cache_missed_tokens": usage.prompt_tokens - reusable,
            "comparison_reusable_tokens": reusable,
        }
        return miss if self._reason else {**miss, "message": self._num_common}


class NotCompared(CacheDiagnosis):
    """There is no earlier response with the id."""

    def __init__(self) -> None:
        super().__init__(None, 0, is_continued=False)

    def as_json(self, usage: Usage) -> Json:
        return {"type": "comparison_response_not_found"}


def _effort(response: Mapping[str, Any]) -> object:
    return (response.get("reasoning") or {}).get("effort")
