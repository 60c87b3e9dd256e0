"""`text_completion`, the same object name in chunks and whole. All pieces are content here."""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.schema.envelope import Envelope, UsageWish
from gateway.schema.frames import End, Finished, Header, Said, Tally

_TEXT_END = b',"logprobs":null,"finish_reason":null}]'


class CompletionFrames(Envelope):
    """A choice's first chunk is its first text."""

    chunk_object = "text_completion"
    whole_object = "text_completion"

    def __init__(self, header: Header, wish: UsageWish) -> None:
        super().__init__(header, wish)
        self._plain_heads: dict[int, bytes] = {}  # of begun choices whose text needs no more
        self._tail = _TEXT_END + self._close

    def delta(self, index: int, said: Said, tally: Tally) -> bytes:
        head = self._plain_heads.get(index)
        if head is not None and len(said) == 1:
            return head + orjson.dumps(said[0]) + self._tail
        if not self._wish.continuous:
            self._plain_heads[index] = self._open + b'{"index":%d,"text":' % index
        text = "".join([piece for piece in said if isinstance(piece, str)])
        return self._chunk(_choice(index, text, None), tally)

    def ending(self, index: int, end: End, tally: Tally) -> bytes:
        return self._chunk(_choice(index, "", end.reason), tally)

    def whole(self, choices: Sequence[Finished], tally: Tally) -> bytes:
        return self._whole(
            [
                _choice(index, choice.content or "", choice.end.reason)
                for index, choice in enumerate(choices)
            ],
            tally,
        )


def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
