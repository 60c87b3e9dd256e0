"""Renders text completions; the object is `text_completion` in chunks and in the body.

Every piece of a choice is content, because text completions have no reasoning and no tool calls.
"""

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
    GenerationProgress,
    OutputToken,
    ResponseHeader,
)

_TEXT_END = b',"logprobs":null,"finish_reason":null}]'


class CompletionRenderer(Envelope):
    """The first chunk of a choice is its first text."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(
        self,
        header: ResponseHeader,
        usage_options: UsageOptions = UsageOptions(),  # noqa: B008 # frozen
        formatter: LogprobsFormatter | None = None,
    ) -> None:
        super().__init__(header, usage_options, formatter)
        # By choice: the constant bytes before the text of a chunk that has text only.
        self._plain_heads: dict[int, bytes] = {}
        self._tail = _TEXT_END + self._close

    def delta(self, index: int, parts: Delta, progress: GenerationProgress) -> bytes:
        """One event with the text and its tokens."""
        head = self._plain_heads.get(index)
        if head is not None and len(parts) == 1:
            return head + orjson.dumps(parts[0]) + self._tail
        if progress_chunk := self._progress_chunk(index, parts, text=""):
            return progress_chunk
        if self._is_plain:
            self._plain_heads[index] = self._open + b'{"index":%d,"text":' % index
        text = "".join([piece for piece in parts if isinstance(piece, str)])
        tokens = output_tokens(parts)
        choice = self._choice(index, text, None, tokens)
        choice |= self._formatter.prompt_ids(prompt_report(parts))
        return self._chunk(choice | (self._formatter.ids(tokens) if tokens else {}), progress)

    def ending(self, index: int, end: ChoiceEnd, progress: GenerationProgress) -> bytes:
        """The finish reason."""
        return self._chunk(self._choice(index, "", end, ()), progress)

    def whole(self, choices: Sequence[FinishedChoice], progress: GenerationProgress) -> bytes:
        """The body. Details of a prompt are repeated in each of its choices."""
        return self._whole(
            [
                {
                    **self._choice(index, choice.content or "", choice.end, choice.tokens),
                    **self._formatter.ids(choice.tokens),
                    **self._formatter.prompt_ids(choice.prompt),
                    **self._formatter.prompt_logprobs(choice.prompt),
                }
                for index, choice in enumerate(choices)
            ],
            progress,
        )

    def _choice(
        self, index: int, text: str, end: ChoiceEnd | None, tokens: Sequence[OutputToken]
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._formatter.completion(tokens),
            "finish_reason": None if end is None else end.reason,
            **({} if end is None else stop_reason(end)),
        }
