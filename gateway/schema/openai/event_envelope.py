"""The envelope around `choices` in OpenAI's server-sent events and bodies.

Everything except the delta is known before the first token, so an event is a constant prefix, the
JSON-escaped text, and a constant suffix.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from gateway.schema.openai.dialect import OpenAIDialect
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import (
    PING,
    ChoiceEnd,
    Delta,
    GenerationProgress,
    OutputToken,
    PromptReport,
    ReportOptions,
    ResponseHeader,
)

if TYPE_CHECKING:
    from gateway.ports import Tokenizer

DONE = b"data: [DONE]\n\n"
_NULL_USAGE = b',"usage":null'
_NO_DETAILS = LogprobsFormatter(lambda token_id: b"")


class UsageOptions(NamedTuple):
    """Token counts in a stream: in a last chunk of their own, and in every chunk."""

    at_the_end: bool = False
    continuous: bool = False


class Envelope:
    """What the renderers of chat and text completions share."""

    chunk_object: str
    whole_object: str
    ping = PING

    def __init__(
        self,
        header: ResponseHeader,
        usage_options: UsageOptions = UsageOptions(),  # noqa: B008 # frozen
        formatter: LogprobsFormatter | None = None,
        **extra: str,
    ) -> None:
        self._header = header
        self._extra = extra
        self._usage_options = usage_options
        self._formatter = formatter or _NO_DETAILS
        self._is_plain = formatter is None and not usage_options.continuous
        open_json = orjson.dumps(self._envelope(self.chunk_object))[:-1]
        self._open = b"data: " + open_json + b',"choices":['
        self._close = (_NULL_USAGE if usage_options.at_the_end else b"") + b"}\n\n"

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

    def _chunk(self, choice: dict[str, Any], progress: GenerationProgress, **more: Any) -> bytes:
        rest = b"".join(b',"%s":%s' % (k.encode(), orjson.dumps(v)) for k, v in more.items())
        close = self._close
        if self._usage_options.continuous:
            close = b',"usage":' + orjson.dumps(progress.usage.as_json()) + b"}\n\n"
        return self._open + orjson.dumps(choice) + b"]" + rest + close

    def _progress_chunk(self, index: int, parts: Delta, **choice: Any) -> bytes:
        """A chunk without output, in llama.cpp's form, for the progress of a prompt; else empty."""
        report = parts[0]
        if not isinstance(report, PromptReport) or (part := report.progress) is None:
            return b""
        progress = {
            "total": part.total,
            "cache": part.cached,
            "processed": part.processed,
            "time_ms": round(part.seconds * 1e3),
        }
        fields = {"index": index, **choice, "logprobs": None, "finish_reason": None}
        more = b'],"prompt_progress":' + orjson.dumps(progress)
        return self._open + orjson.dumps(fields) + more + self._close

    def closing(self, progress: GenerationProgress) -> bytes:
        """The usage chunk, if the request has `include_usage`, and `[DONE]`."""
        if not self._usage_options.at_the_end:
            return DONE
        usage = orjson.dumps(progress.usage.as_json())
        return self._open + b'],"usage":' + usage + b"}\n\n" + DONE

    def failure(self, error: BaseException) -> bytes:
        """One event with the JSON error body; no `[DONE]` follows."""
        return OpenAIDialect().error_event(error)

    def _whole(
        self, choices: list[dict[str, Any]], progress: GenerationProgress, **more: Any
    ) -> bytes:
        envelope = self._envelope(self.whole_object)
        body = {**envelope, "choices": choices, "usage": progress.usage.as_json(), **more}
        return orjson.dumps(body)


def token_formatter(report: ReportOptions, tokenizer: "Tokenizer") -> LogprobsFormatter | None:
    """The formatter of the requested token details; None if none are requested."""
    if not report.has_tokens and report.prompt_logprobs is None:
        return None
    return LogprobsFormatter(tokenizer.token_bytes, report.logprobs, report.token_ids)


def output_tokens(parts: Delta) -> Sequence[OutputToken]:
    """The tokens of a delta."""
    return [piece for piece in parts if isinstance(piece, OutputToken)]


def prompt_report(parts: Delta) -> PromptReport | None:
    """The prompt report of a delta, if it has one."""
    return next((piece for piece in parts if isinstance(piece, PromptReport)), None)


def stop_reason(end: ChoiceEnd) -> dict[str, str | int]:
    """vLLM's `stop_reason`: the request's stop string or stop token id that ended the choice."""
    return {} if end.stopped_by is None else {"stop_reason": end.stopped_by}
