"""`text_completion`, the same object name in chunks and whole. All pieces are content here."""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.schema.openai.event_envelope import (
    Envelope,
    UsageOptions,
    output_tokens,
    prompt_report,
    stop_reason,
)
from gateway.schema.openai.logprobs import LogprobsFormatter
from gateway.schema.rendering import (
    ChoiceEnd,
    Delta,
    FinishedChoice,
    OutputToken,
    Progress,
    ResponseHeader,
)

_TEXT_END = b',"logprobs":null,"finish_reason":null}]'


class CompletionRenderer(Envelope):
    """A choice's first chunk is its first text."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self,
        header: ResponseHeader,
        wish: UsageOptions = UsageOptions(),  # noqa: B008 # frozen
        spelling: LogprobsFormatter | None = None,
    ) -> None:
        super().__init__(header, wish, spelling)
        self._plain_heads: dict[int, bytes] = {}  # of begun choices whose text needs no more
        self._tail = _TEXT_END + self._close

    def delta(self, index: int, said: Delta, tally: Progress) -> bytes:
        """One event, tokens told with the text."""
        head = self._plain_heads.get(index)
        if head is not None and len(said) == 1:
            return head + orjson.dumps(said[0]) + self._tail
        if self._is_plain:
            self._plain_heads[index] = self._open + b'{"index":%d,"text":' % index
        text = "".join([piece for piece in said if isinstance(piece, str)])
        drawn = output_tokens(said)
        choice = self._choice(index, text, None, drawn)
        choice |= self._spelling.prompt_ids(prompt_report(said))
        return self._chunk(choice | (self._spelling.ids(drawn) if drawn else {}), tally)

    def ending(self, index: int, end: ChoiceEnd, tally: Progress) -> bytes:
        """The finish reason."""
        return self._chunk(self._choice(index, "", end, ()), tally)

    def whole(self, choices: Sequence[FinishedChoice], tally: Progress) -> bytes:
        """The body; what is told of a prompt is told with each of its choices."""
        return self._whole(
            [
                {
                    **self._choice(index, choice.content or "", choice.end, choice.drawn),
                    **self._spelling.ids(choice.drawn),
                    **self._spelling.prompt_ids(choice.prompt),
                    **self._spelling.prompt_logprobs(choice.prompt),
                }
                for index, choice in enumerate(choices)
            ],
            tally,
        )

    def _choice(
        self, index: int, text: str, end: ChoiceEnd | None, drawn: Sequence[OutputToken]
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._spelling.completion(drawn),
            "finish_reason": None if end is None else end.reason,
            **({} if end is None else stop_reason(end)),
        }
