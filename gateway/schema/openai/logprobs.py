"""Tokens on the wire: log-probabilities as chat and text completions spell them, and plain ids.

A token whose bytes are no UTF-8 by themselves is spelt `bytes:\\xe2\\x82`, as OpenAI does.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.schema.rendering import OutputToken, PromptReport

if TYPE_CHECKING:
    from engine.step import TokenLogprobs

LEAST = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class LogprobsFormatter:
    """What is told of tokens: `logprobs` is how many likeliest ones come with each, or None."""

    token_bytes: Callable[[int], bytes]
    logprobs: int | None = None
    token_ids: bool = False

    def chat(self, drawn: Iterable[OutputToken]) -> dict[str, Any] | None:
        """`choices[].logprobs` of chat completions; null where not asked for or empty."""
        if self.logprobs is None:
            return None
        content = [self._entry(token.token_id, token.logprobs) for token in _shown(drawn)]
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token_id: int, told: "TokenLogprobs | None") -> dict[str, Any]:
        entry = self._scored(token_id, None if told is None else told.logprob)
        top = () if told is None else told.top[: self.logprobs]
        return {**entry, "top_logprobs": [self._scored(*scored) for scored in top]}

    def _scored(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = self.token_bytes(token_id)
        return {"token": formatted_logprobs(data), "logprob": _finite(logprob), "bytes": list(data)}

    def completion(self, drawn: Iterable[OutputToken]) -> dict[str, Any] | None:
        """`choices[].logprobs` of text completions; the token itself is always among the top."""
        tokens = _shown(drawn)
        if self.logprobs is None or not tokens:
            return None
        return {
            "tokens": [self.spell(token.token_id) for token in tokens],
            "token_logprobs": [
                None if token.logprobs is None else _finite(token.logprobs.logprob)
                for token in tokens
            ],
            "top_logprobs": [
                None if token.logprobs is None else self._top(token.token_id, token.logprobs)
                for token in tokens
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token_id: int, told: "TokenLogprobs") -> dict[str, float | None]:
        top = {self.spell(other): _finite(value) for other, value in told.top[: self.logprobs]}
        return top | {self.spell(token_id): _finite(told.logprob)}

    def ids(self, drawn: Iterable[OutputToken]) -> dict[str, list[int]]:
        """`token_ids` of a choice, the end token too, where asked for."""
        return {"token_ids": [token.token_id for token in drawn]} if self.token_ids else {}

    def prompt_ids(self, prompt: PromptReport | None) -> dict[str, list[int]]:
        """`prompt_token_ids`, where asked for."""
        if prompt is None or not self.token_ids:
            return {}
        return {"prompt_token_ids": list(prompt.token_ids)}

    def prompt_logprobs(self, prompt: PromptReport | None) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`: for each token of the prompt the likeliest by their ids."""
        if prompt is None or not prompt.logprobs:
            return {}
        told = zip(prompt.token_ids, prompt.logprobs, strict=True)
        return {
            "prompt_logprobs": [
                None if logprobs is None else self._ranked(token_id, logprobs)
                for token_id, logprobs in told
            ]
        }

    def _ranked(self, token_id: int, told: "TokenLogprobs") -> dict[str, Any]:
        ranked = {other: (value, rank) for rank, (other, value) in enumerate(told.top, 1)}
        ranked.setdefault(token_id, (told.logprob, told.rank))
        return {
            str(other): {
                "logprob": _finite(value),
                "rank": rank,
                "decoded_token": self.spell(other),
            }
            for other, (value, rank) in ranked.items()
        }

    def spell(self, token_id: int) -> str:
        """A token as text."""
        return formatted_logprobs(self.token_bytes(token_id))


def formatted_logprobs(data: bytes) -> str:
    """The bytes of a token as text."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _shown(drawn: Iterable[OutputToken]) -> Sequence[OutputToken]:
    return [token for token in drawn if not token.is_end]


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
