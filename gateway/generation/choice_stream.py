"""Voice: one choice of a response, from its tokens to the pieces of its message.

tokens ──decoder──▶ bytes ──TextStream──▶ text ──parser──▶ pieces
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from engine.request import Abort, FinishReason
from gateway.generation.text import TextStream
from gateway.generation.token_text import TokenText
from gateway.ports import CallBegin, Piece, StreamParser
from gateway.schema.rendering import ChoiceEnd, Delta, OutputToken, PromptReport, ReportOptions

if TYPE_CHECKING:
    from engine.step import TokenLogprobs
    from engine.stream import TokenChunk, TokenStream
    from gateway.ports import TokenDecoder

_CALLED = "tool_calls"


@dataclass(frozen=True, slots=True)
class ChoiceOptions:
    """How an answer is heard. The decoder and the parser are fresh, and its own.

    `own_ends` are end tokens that the caller asked for. A ranked answer is scored by its tokens'
    log-probabilities; of a mute one only the prompt is told.
    """

    decoder: "TokenDecoder"
    stops: Sequence[str] = ()
    parser: StreamParser | None = None
    told: ReportOptions = ReportOptions()  # noqa: RUF009 # frozen
    own_ends: frozenset[int] = frozenset()
    is_ranked: bool = False
    is_mute: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether nothing is cut, counted or told but text."""
        is_told = self.told != ReportOptions(special_tokens=self.told.special_tokens)
        return not (self.stops or self.parser or is_told or self.is_ranked or self.is_mute)


class ChoiceStream:
    """One choice. `end` is None until `next` has returned the last of its message.

    Unless all is plain, tokens are read one by one, so that nothing depends on how they were
    gathered in chunks.
    """

    def __init__(self, index: int, tokens: "TokenStream", ear: ChoiceOptions) -> None:
        self.index = index
        self.end: ChoiceEnd | None = None
        self.num_tokens = 0
        self.num_reasoning = 0  # of the tokens
        self._sum_logprobs = 0.0  # of the tokens, if the answer is ranked
        self._tokens = tokens
        self._ear = ear
        self._parser = ear.parser
        self._text = TextStream(ear.decoder, ear.stops, shows_stop=ear.told.stop_string)
        self._drawn = TokenText(self._text)
        self._said: list[Piece] = []  # since the last return
        self._beside: list[OutputToken | PromptReport] = []  # to be told with the next piece
        self._has_begun = self._has_called = False
        self._is_plain = ear.is_plain

    async def next(self) -> Delta:
        """Wait for news; what it adds to the message, which may be nothing.

        Raises `RequestFailed` or `Unavailable` if the request was lost.
        """
        chunk = await self._tokens.next()
        if self._is_plain and chunk.finish is None:
            self.num_tokens += len(chunk.tokens)
            text = self._text.feed(chunk.tokens)
            return (text,) if text else ()
        return self._hear(chunk)

    def _hear(self, chunk: "TokenChunk") -> Delta:
        if not self._has_begun and chunk.tokens:
            self._begin(chunk.prompt_logprobs)
            if self._ear.is_mute:
                self._tokens.close(Abort.STOP_STRING)
                return self._ended(ChoiceEnd(FinishReason.LENGTH.value))
        finish, tokens = chunk.finish, chunk.tokens
        is_hidden = finish is FinishReason.STOP and not self._shows_end(tokens[-1])
        scores: Iterable[TokenLogprobs | None] = chunk.logprobs or repeat(None)
        for at, (token, score) in enumerate(zip(tokens, scores, strict=False), 1):
            self._count(score)
            if is_hidden and at == len(tokens):
                return self._finish(FinishReason.STOP, token, score)
            self._read(token, score)
            if self._is_over:
                return self._finish(FinishReason.STOP, token)
        if finish is None:
            return self._drain() if self._said else ()
        return self._finish(finish, tokens[-1] if tokens else None)

    def _begin(self, logprobs: "Sequence[TokenLogprobs]") -> None:
        """The prompt, where it is told; the first token has no probability."""
        self._has_begun = True
        told, ids = self._ear.told, self._tokens.spec.prompt
        if told.token_ids or told.prompt_logprobs is not None:
            known = () if told.prompt_logprobs is None else (None, *logprobs)
            self._beside.append(PromptReport(ids, known))
        if told.echo:
            self._echo(ids, (None, *logprobs) if logprobs else repeat(None))

    def _echo(self, ids: Sequence[int], scores: "Iterable[TokenLogprobs | None]") -> None:
        text = TextStream(self._ear.decoder)
        drawn = TokenText(text)
        if self._ear.told.has_tokens:
            for token, score in zip(ids, scores, strict=False):
                self._parse(drawn.feed(token, score))
                self._beside += drawn.due()
        else:
            drawn.num_shown += len(shown := text.feed(ids))
            self._parse(shown)
        self._parse(drawn.finish())
        self._beside += drawn.rest()
        self._drawn.num_shown = drawn.num_shown

    def _shows_end(self, token: int) -> bool:
        return self._ear.told.stop_string and token in self._ear.own_ends

    def _count(self, score: "TokenLogprobs | None") -> None:
        self.num_tokens += 1
        if self._ear.is_ranked and score is not None:
            self._sum_logprobs += score.logprob

    def _read(self, token: int, score: "TokenLogprobs | None") -> None:
        """A token that is shown; it counts as reasoning if it was, or led there."""
        was_reasoning = self._is_reasoning
        if self._ear.told.has_tokens:
            self._parse(self._drawn.feed(token, score))
            self._beside += self._drawn.due()
        else:
            self._parse(self._text.feed((token,)))
        self.num_reasoning += was_reasoning or self._is_reasoning

    def _parse(self, text: str) -> None:
        if not text:
            return
        if self._parser is None:
            self._said.append(text)
        else:
            self._said += self._parser.feed(text)

    def _finish(
        self, finish: FinishReason, last: int | None, hidden_score: "TokenLogprobs | None" = None
    ) -> Delta:
        """The rest of the message. `last` is the last token, an end token if the reason is STOP
        and no stop string was met."""
        if self._is_over:
            self._tokens.close(Abort.STOP_STRING)
        self._parse(self._drawn.finish())
        if self._text.is_stopped:
            finish = FinishReason.STOP  # also by what was completed only now
            self._tokens.close(Abort.STOP_STRING)
        self._beside += self._drawn.rest()
        if self._parser is not None:
            self._said += self._parser.finish()
        stopped_by: str | int | None = self._text.stopped
        if finish is FinishReason.STOP and last is not None and not self._is_over:
            stopped_by = last if last in self._ear.own_ends else None
            if self._ear.told.has_tokens and not self._shows_end(last):
                end = OutputToken(last, self._drawn.num_shown, hidden_score, is_end=True)
                self._beside.append(end)
        return self._ended(ChoiceEnd(finish.value, stopped_by))

    def _ended(self, end: ChoiceEnd) -> Delta:
        said = self._drain()
        has_called = self._has_called and end.reason == FinishReason.STOP.value
        self.end = end._replace(reason=_CALLED) if has_called else end
        return said

    def _drain(self) -> Delta:
        """What was said, and what is told beside it."""
        said, self._said = self._said, []
        if self._parser is not None:
            self._has_called |= any(isinstance(piece, CallBegin) for piece in said)
        beside, self._beside = self._beside, []
        return [*said, *beside]

    @property
    def _is_over(self) -> bool:
        """Whether nothing that comes is part of the message."""
        is_complete = self._parser is not None and self._parser.is_complete
        return self._text.is_stopped or is_complete

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    @property
    def score(self) -> float:
        """The mean log-probability of a ranked answer's tokens."""
        return self._sum_logprobs / max(1, self.num_tokens)

    @property
    def num_shown(self) -> int:
        """Tokens that the caller has asked for; a mute answer's token is none."""
        return 0 if self._ear.is_mute else self.num_tokens

    @property
    def num_cached(self) -> int:
        """Tokens of its prompt that were found in the prefix cache."""
        return self._tokens.request.num_cached

    def close(self, reason: Abort) -> None:
        """End it early."""
        self._tokens.close(reason)
