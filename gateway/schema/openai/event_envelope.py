"""OpenAI's server-sent events rendered once as bytes: the envelope around `choices`.

Everything but the delta is known before the first token, so an event is a ready prefix, the
JSON-escaped text, and a ready suffix.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from gateway.errors import error_body
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import (
    PING,
    ChoiceEnd,
    Delta,
    OutputToken,
    Progress,
    PromptReport,
    ResponseHeader,
)

DONE = b"data: [DONE]\n\n"
_NULL_USAGE = b',"usage":null'
_NOTHING = LogprobsFormatter(lambda token_id: b"")


class UsageOptions(NamedTuple):
    """What `stream_options` asks for: counts in a chunk of their own, and in every chunk."""

    at_the_end: bool = False
    continuous: bool = False


class Envelope:
    """What the frames of chat and text completions share."""

    chunk_object: str
    whole_object: str
    ping = PING

    def __init__(
        self,
        header: ResponseHeader,
        wish: UsageOptions = UsageOptions(),  # noqa: B008 # frozen
        spelling: LogprobsFormatter | None = None,
        **extra: str,
    ) -> None:
        self._header = header
        self._extra = extra
        self._wish = wish
        self._spelling = spelling or _NOTHING
        self._is_plain = spelling is None and not wish.continuous
        open_json = orjson.dumps(self._envelope(self.chunk_object))[:-1]
        self._open = b"data: " + open_json + b',"choices":['
        self._close = (_NULL_USAGE if wish.at_the_end else b"") + b"}\n\n"

    def _envelope(self, kind: str) -> dict[str, Any]:
        header = self._header
        return {
            "id": header.response_id,
            "object": kind,
            "created": header.created,
            "model": header.model,
            "system_fingerprint": header.fingerprint,
            **self._extra,
        }

    def _chunk(self, choice: dict[str, Any], tally: Progress, **more: Any) -> bytes:
        rest = b"".join(b',"%s":%s' % (k.encode(), orjson.dumps(v)) for k, v in more.items())
        close = self._close
        if self._wish.continuous:
            close = b',"usage":' + orjson.dumps(tally.usage.as_json()) + b"}\n\n"
        return self._open + orjson.dumps(choice) + b"]" + rest + close

    def closing(self, tally: Progress) -> bytes:
        """The chunk that `include_usage` asks for, and the end."""
        if not self._wish.at_the_end:
            return DONE
        usage = orjson.dumps(tally.usage.as_json())
        return self._open + b'],"usage":' + usage + b"}\n\n" + DONE

    def failure(self, error: BaseException) -> bytes:
        """One event with the usual JSON error, and nothing after it."""
        return b"data: " + error_body(error) + b"\n\n"

    def _whole(self, choices: list[dict[str, Any]], tally: Progress, **more: Any) -> bytes:
        envelope = self._envelope(self.whole_object)
        body = {**envelope, "choices": choices, "usage": tally.usage.as_json(), **more}
        return orjson.dumps(body)


def output_tokens(said: Delta) -> Sequence[OutputToken]:
    """The tokens that are told."""
    return [piece for piece in said if isinstance(piece, OutputToken)]


def prompt_report(said: Delta) -> PromptReport | None:
    """The prompt, if it is told here."""
    return next((piece for piece in said if isinstance(piece, PromptReport)), None)


def stop_reason(end: ChoiceEnd) -> dict[str, str | int]:
    """vLLM's `stop_reason`, where it was the caller's stop string or end token."""
    return {} if end.stopped_by is None else {"stop_reason": end.stopped_by}
