"""ChoiceStream: one choice of a response, from its tokens to the parts of its message.

tokens ──decoder──▶ bytes ──TextStream──▶ text ──parser──▶ pieces
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

from engine.media import replaced
from engine.request import Abort, FinishReason, Request
from engine.step import TokenLogprobs
from engine.stream import TokenChunk, TokenStream, Write
from gateway.generation.text import TextStream, TokenText
from gateway.ports import CallBegin, Piece, StreamParser, TokenDecoder
from gateway.schema.rendering import (
    ChoiceEnd,
    Delta,
    OutputToken,
    PromptProgress,
    PromptReport,
    ReportOptions,
)

MANY_TOKENS = 500  # reported one by one; more of them are reported and rendered in a thread
_TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """How the tokens of one choice are turned into a message.

    The decoder and the parser are fresh and used by this choice only. `caller_end_ids` are the
    request's `stop_token_ids`. A ranked choice sums its tokens' log-probabilities; of a
    prompt-only choice no output is reported. `is_single`: each delta is of one token, so that the
    events of a message do not depend on how tokens were grouped into chunks.
    """

    decoder: TokenDecoder
    stop_strings: Sequence[str] = ()
    parser: StreamParser | None = None
    report: ReportOptions = ReportOptions()  # noqa: RUF009 # frozen
    caller_end_ids: frozenset[int] = frozenset()
    is_ranked: bool = False
    is_prompt_only: bool = False
    is_single: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the message is the decoded text and nothing else."""
        reports_more = self.report != ReportOptions(special_tokens=self.report.special_tokens)
        return not (
            self.stop_strings
            or self.parser
            or reports_more
            or self.is_ranked
            or self.is_prompt_only
        )


class DirectSink(Protocol):
    """Takes what choices add without waiting, while it is open."""

    def is_open(self) -> bool: ...

    def add(self, index: int, delta: Delta, writes: list[Write]) -> None: ...


class ChoiceStream:
    """One choice. `end` is None until `next` has returned the last part of the message.

    A plain choice is decoded chunk by chunk, any other one token by token; so the message does
    not depend on how tokens were grouped into chunks.
    """

    __slots__ = (
        "_chunks", "_direct", "_early_end", "_has_begun", "_has_called", "_is_plain", "_last_delta",
        "_options", "_parser", "_pieces", "_report", "_reports", "_sum_logprobs", "_text",
        "_token_text", "_tokens", "end", "index", "num_reasoning_tokens", "num_tokens",
    )  # fmt: skip

    def __init__(self, index: int, tokens: TokenStream, options: ChoiceOptions) -> None:
        self.index = index
        self.end: ChoiceEnd | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self._sum_logprobs = 0.0  # if the choice is ranked
        self._tokens = tokens
        self._options = options
        self._report = options.report
        self._parser = options.parser
        self._text = TextStream(
            options.decoder, options.stop_strings, includes_stop=options.report.stop_string
        )
        self._token_text = TokenText(self._text)
        self._pieces: list[Piece] = []  # the message's pieces since the last delta
        self._reports: list[OutputToken | PromptReport] = []  # go out with the next delta
        self._has_begun = self._has_called = False
        self._early_end = ""  # the finish reason if the answer is to end before the model ends it
        self._is_plain = options.is_plain
        self._chunks: deque[TokenChunk] = deque()  # not yet read, if deltas are of one token
        self._direct: DirectSink | None = None  # while `next` waits
        self._last_delta: Delta = ()  # if the message ended while `next` waited

    async def next(self, direct: DirectSink | None = None) -> Delta:
        """Wait for tokens and return what they add to the message, which may be nothing. Meanwhile,
        behind the first delta, what they add goes to `direct` whenever that is open.

        Raises `RequestFailed` or `Unavailable` if the engine lost the request.
        """
        self._direct = direct if self._is_plain or self._has_begun else None
        try:
            relay = self._relay if self._direct else None
            chunk = self._chunks.popleft() if self._chunks else await self._tokens.next(relay)
        finally:
            self._direct = None  # it refers to this
        if self._options.is_single and len(chunk.tokens) > 1:
            self._chunks.extend(chunk.split())
            chunk = self._chunks.popleft()
        if self.end is not None:
            return self._last_delta
        if self._early_end and chunk.finish is None and not self._chunks:
            return self._process_last(chunk)
        if self._is_plain and chunk.finish is None:
            self.num_tokens += len(chunk.tokens)
            text = self._text.feed(chunk.tokens)
            return (text,) if text else ()
        is_echo = self._report.echo and not self._has_begun and bool(chunk.tokens)
        if is_echo and len(self._tokens.spec.prompt) > MANY_TOKENS:
            await asyncio.to_thread(self._begin, chunk.prompt_logprobs)
        return self._process(chunk)

    def _relay(self, tokens: list[int], writes: list[Write]) -> bool:
        direct = self._direct
        if direct is None or not direct.is_open():
            return False
        if self._is_plain:
            self.num_tokens += len(tokens)
            text = self._text.feed(tokens)
            delta: Delta = (text,) if text else ()
        else:
            delta = self._process(TokenChunk(tuple(tokens), None))
        if self.end is not None:
            self._last_delta = delta
            self._tokens.wake()
        elif delta:
            direct.add(self.index, delta, writes)
        return True

    def end_early(self, reason: str) -> None:
        """End the message after the tokens that have arrived, with this finish reason. An answer
        that calls tools goes on to its own end."""
        if not self._has_called and self.end is None:
            self._early_end = reason
            self._tokens.wake()

    def _process_last(self, chunk: TokenChunk) -> Delta:
        """End the message. Text that the parser still withholds, such as the begin of a tool call,
        is no part of it."""
        delta = self._process(chunk)
        if self.end is not None or self._has_called:
            self._early_end = ""
            return delta
        self._tokens.close(Abort.STOP_STRING)
        self._parse(self._token_text.finish() if self._parser is None else "")
        return [*delta, *self._ended(ChoiceEnd(self._early_end))]

    def _process(self, chunk: TokenChunk) -> Delta:
        if not self._has_begun and chunk.tokens:
            self._begin(chunk.prompt_logprobs)
            if self._options.is_prompt_only:
                self._tokens.close(Abort.STOP_STRING)
                return self._ended(ChoiceEnd(FinishReason.LENGTH.value))
        finish, tokens = chunk.finish, chunk.tokens
        if self._report.progress and not self._has_begun and finish is None:
            return (PromptReport((), progress=self.prompt_progress),)
        is_stop = finish is FinishReason.STOP and bool(tokens)  # a prompt alone has no tokens
        hides_last = is_stop and not self._shows_end_token(tokens[-1])
        logprobs: Iterable[TokenLogprobs | None] = chunk.logprobs or repeat(None)
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=False), 1):
            self.num_tokens += 1
            if self._options.is_ranked and logprob is not None:
                self._sum_logprobs += logprob.logprob
            if hides_last and i == len(tokens):
                return self._finish(FinishReason.STOP, token, logprob)
            self._add_token(token, logprob)
            if self._is_complete:
                return self._finish(FinishReason.STOP, token)
        if finish is None:
            return self._take_delta() if self._pieces else ()
        return self._finish(finish, tokens[-1] if tokens else None)

    def _begin(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Report the prompt if requested; its first token, and those that stand for images, have no
        log-probability."""
        self._has_begun = True
        report, spec = self._report, self._tokens.spec
        ids = spec.prompt
        if report.token_ids or report.prompt_logprobs is not None:
            has_none = report.prompt_logprobs is None
            scored = () if has_none else (None, *replaced(logprobs, spec.media, None, 1))
            self._reports.append(PromptReport(ids, scored))
        if report.echo:
            self._echo(ids, (None, *logprobs) if logprobs else repeat(None))

    def _echo(self, ids: Sequence[int], logprobs: Iterable[TokenLogprobs | None]) -> None:
        text = TextStream(self._options.decoder)
        token_text = TokenText(text)
        if self._report.has_tokens:
            for token, logprob in zip(ids, logprobs, strict=False):
                self._parse(token_text.feed(token, logprob))
                self._reports += token_text.take_due()
        else:
            visible = text.feed(ids)
            token_text.num_visible += len(visible)
            self._parse(visible)
        self._parse(token_text.finish())
        self._reports += token_text.take_rest()
        self._token_text.num_visible = token_text.num_visible

    def _shows_end_token(self, token: int) -> bool:
        return self._report.stop_string and token in self._options.caller_end_ids

    def _add_token(self, token: int, logprob: TokenLogprobs | None) -> None:
        """Add a visible token. It counts as reasoning if reasoning is open before or after it."""
        was_reasoning = self._is_reasoning
        if self._report.has_tokens:
            self._parse(self._token_text.feed(token, logprob))
            self._reports += self._token_text.take_due()
        else:
            self._parse(self._text.feed((token,)))
        self.num_reasoning_tokens += was_reasoning or self._is_reasoning

    def _parse(self, text: str) -> None:
        if not text:
            return
        if self._parser is None:
            self._pieces.append(text)
        else:
            self._pieces += self._parser.feed(text)

    def _finish(
        self, finish: FinishReason, last: int | None, hidden_logprob: TokenLogprobs | None = None
    ) -> Delta:
        """The rest of the message.

        `last` is the last token; it is an end token if `finish` is STOP and neither a stop string
        nor the parser has completed the message.
        """
        if self._is_complete:
            self._tokens.close(Abort.STOP_STRING)
        self._parse(self._token_text.finish())
        if self._text.is_stopped:
            finish = FinishReason.STOP  # the flushed text may have completed a stop string
            self._tokens.close(Abort.STOP_STRING)
        self._reports += self._token_text.take_rest()
        if self._parser is not None:
            self._pieces += self._parser.finish()
        stopped_by: str | int | None = self._text.matched_stop
        if finish is FinishReason.STOP and last is not None and not self._is_complete:
            stopped_by = last if last in self._options.caller_end_ids else None
            if self._report.has_tokens and not self._shows_end_token(last):
                offset = self._token_text.num_visible
                self._reports.append(OutputToken(last, offset, hidden_logprob, is_end=True))
        return self._ended(ChoiceEnd(finish.value, stopped_by))

    def _ended(self, end: ChoiceEnd) -> Delta:
        delta = self._take_delta()
        has_called = self._has_called and end.reason == FinishReason.STOP.value
        self.end = end._replace(reason=_TOOL_CALLS) if has_called else end
        return delta

    def _take_delta(self) -> Delta:
        """The pieces of the message since the last delta, and the reports that go with them."""
        pieces, self._pieces = self._pieces, []
        if self._parser is not None:
            self._has_called |= any(isinstance(piece, CallBegin) for piece in pieces)
        reports, self._reports = self._reports, []
        return [*pieces, *reports]

    @property
    def _is_complete(self) -> bool:
        """Whether no further token can belong to the message."""
        has_parsed_all = self._parser is not None and self._parser.is_complete
        return self._text.is_stopped or has_parsed_all

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    @property
    def request(self) -> Request:
        """Its progress in the engine."""
        return self._tokens.request

    @property
    def score(self) -> float:
        """The mean log-probability of a ranked choice's tokens."""
        return self._sum_logprobs / max(1, self.num_tokens)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens counted in the usage; the one token of a prompt-only choice is not."""
        return 0 if self._options.is_prompt_only else self.num_tokens

    @property
    def prompt_progress(self) -> PromptProgress:
        """How much of its prompt is computed, as of the last update of its stream."""
        stream, request = self._tokens, self._tokens.request
        processed = min(request.num_computed, request.prompt_len)
        return PromptProgress(
            request.prompt_len, request.num_cached, processed, stream.prefill_seconds
        )
