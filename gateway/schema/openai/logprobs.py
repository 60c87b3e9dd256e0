"""Token details of a response: ids, and log-probabilities as either completion endpoint has them.

A token whose bytes are not valid UTF-8 is written as `bytes:\\xe2\\x82`, as OpenAI does.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.step import TokenLogprobs
from gateway.schema.rendering import OutputToken, PromptReport

MIN_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class LogprobsFormatter:
    """Formats token details. `logprobs` is the number of top alternatives per token; None: no
    log-probabilities. `token_bytes` gives the bytes of a token id."""

    token_bytes: Callable[[int], bytes]
    logprobs: int | None = None
    token_ids: bool = False

    def chat(self, tokens: Iterable[OutputToken]) -> dict[str, Any] | None:
        """`choices[].logprobs` of chat completions; None if not requested, or without tokens."""
        if self.logprobs is None:
            return None
        content = [self._entry(token.token_id, token.logprobs) for token in _without_end(tokens)]
        return {"content": content, "refusal": None} if content else None

    def _entry(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, Any]:
        entry = self._scored(token_id, None if logprobs is None else logprobs.logprob)
        top = () if logprobs is None else logprobs.top[: self.logprobs]
        return {**entry, "top_logprobs": [self._scored(*scored) for scored in top]}

    def _scored(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        data = self.token_bytes(token_id)
        return {"token": token_as_text(data), "logprob": _finite(logprob), "bytes": list(data)}

    def completion(self, tokens: Iterable[OutputToken]) -> dict[str, Any] | None:
        """`choices[].logprobs` of text completions; `top_logprobs` always has the token itself."""
        tokens = _without_end(tokens)
        if self.logprobs is None or not tokens:
            return None
        return {
            "tokens": [self.text(token.token_id) for token in tokens],
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

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float | None]:
        top = {self.text(other): _finite(value) for other, value in logprobs.top[: self.logprobs]}
        return top | {self.text(token_id): _finite(logprobs.logprob)}

    def ids(self, tokens: Iterable[OutputToken]) -> dict[str, list[int]]:
        """`token_ids` of a choice, with the end token, if requested."""
        return {"token_ids": [token.token_id for token in tokens]} if self.token_ids else {}

    def prompt_ids(self, prompt: PromptReport | None) -> dict[str, list[int]]:
        """`prompt_token_ids`, if requested."""
        if prompt is None or not self.token_ids:
            return {}
        return {"prompt_token_ids": list(prompt.token_ids)}

    def prompt_logprobs(self, prompt: PromptReport | None) -> dict[str, Any]:
        """vLLM's `prompt_logprobs`: for each prompt token, the top alternatives by token id."""
        if prompt is None or not prompt.logprobs:
            return {}
        scored = zip(prompt.token_ids, prompt.logprobs, strict=True)
        return {
            "prompt_logprobs": [
                None if logprobs is None else self._ranked(token_id, logprobs)
                for token_id, logprobs in scored
            ]
        }

    def _ranked(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        ranked = {other: (value, rank) for rank, (other, value) in enumerate(logprobs.top, 1)}
        ranked.setdefault(token_id, (logprobs.logprob, logprobs.rank))
        return {
            str(other): {"logprob": _finite(value), "rank": rank, "decoded_token": self.text(other)}
            for other, (value, rank) in ranked.items()
        }

    def text(self, token_id: int) -> str:
        """The text of a token, or its bytes as `bytes:\\x…`."""
        return token_as_text(self.token_bytes(token_id))


def token_as_text(data: bytes) -> str:
    """The bytes of a token as text, or as `bytes:\\x…` if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _without_end(tokens: Iterable[OutputToken]) -> Sequence[OutputToken]:
    return [token for token in tokens if not token.is_end]


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)
