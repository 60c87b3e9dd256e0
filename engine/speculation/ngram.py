"""Prompt lookup: what followed the last tokens where they occurred before in the same request.

Saxena, "Prompt Lookup Decoding" (2023); vLLM calls the method ngram. The longest match is used, and
of equally long ones the latest.
"""

from engine.media import replaced
from engine.request import Request
from engine.speculation.proposers import NO_PROPOSAL, Proposal
from engine.speculation.settings import SpeculationSettings
from engine.speculation.token_index import END, TokenIndex
from engine.step import RequestId

TOKENS_PER_CALL = 2048  # fixed: about 1 ms of the event loop, to add tokens to an index


class RequestIndexes:
    """An index of the prompt and the output of each request, extended when it is used. An image
    ends the text before it."""

    def __init__(self, gram: int) -> None:
        self._gram = gram
        self._indexes: dict[RequestId, TokenIndex] = {}

    def index(self, request: Request) -> TokenIndex | None:
        """The request's index; None if more calls are needed to complete it."""
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = TokenIndex(self._gram)
        known, total = len(index), request.num_tokens
        stop = min(total, known + TOKENS_PER_CALL)
        if known < stop:
            tokens, media = request.tokens(known, stop), request.spec.media
            index.extend(replaced(tokens, media, END, known) if media else tokens)
        return index if stop == total else None

    def forget(self, request: Request) -> None:
        self._indexes.pop(request.request_id, None)


class NgramProposer:
    """Looks up the last `lookup_min` to `lookup_max` tokens in the request itself."""

    name = "ngram"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._lookup_max = settings.lookup_max
        self._indexes = RequestIndexes(settings.lookup_min)

    def propose(self, request: Request, count: int) -> Proposal:
        index = self._indexes.index(request)
        if index is None:
            return NO_PROPOSAL
        match = index.find(index.tail(self._lookup_max), tries=1)
        if not match.length:
            return NO_PROPOSAL
        return Proposal(tuple(index.follow(match.ends[0], count)), match.length)

    def forget(self, request: Request) -> None:
        self._indexes.forget(request)
