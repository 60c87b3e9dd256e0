"""The port of proposers, which guess the next tokens of a request, and those that look tokens up.

Prompt lookup: what followed the last tokens where they occurred before in the same request.

Saxena, "Prompt Lookup Decoding" (2023); vLLM calls the method ngram. The longest match is used, and
of equally long ones the latest.

Suffix decoding: what followed the last tokens in this request, or in recent outputs.

Oliaro et al., "SuffixDecoding" (2024). The longest match is used; where it occurs several times,
each draft is the most frequent continuation. Only outputs of requests with the same salt are read,
as in the prefix cache, so that no caller learns from the timing what another one was answered.
"""

from collections import Counter, OrderedDict, deque
from typing import NamedTuple, Protocol

from engine.media import replaced
from engine.request import Request
from engine.speculation.settings import SpeculationSettings
from engine.speculation.token_index import END, NO_MATCH, Match, TokenIndex
from engine.step import RequestId


class Proposal(NamedTuple):
    """Guessed next tokens. `length` is how many tokens before them were matched: the longer the
    match, the more likely the guess is right."""

    tokens: tuple[int, ...]
    length: int

    def before(self, end_ids: frozenset[int]) -> "Proposal":
        """The guess up to the first token that would end the output."""
        for count, token in enumerate(self.tokens):
            if token in end_ids:
                return Proposal(self.tokens[:count], self.length)
        return self


NO_PROPOSAL = Proposal((), 0)


class Proposer(Protocol):
    """Guesses from tokens alone; keeps what it needs of each request until `forget`."""

    @property
    def name(self) -> str: ...

    def propose(self, request: Request, count: int) -> Proposal:
        """Up to `count` tokens that may follow the request's last token; none if unknown."""

    def forget(self, request: Request) -> None:
        """The request has ended."""


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


MAX_TOKENS = 1 << 18  # fixed: a limit of memory, about 50 MiB; of all recent outputs


class _Outputs:
    """Recent outputs of one salt, in two generations: when the newer one is full, the older one is
    dropped."""

    def __init__(self, gram: int) -> None:
        self._gram = gram
        self.older = TokenIndex(gram)
        self.newer = TokenIndex(gram)
        self._num_newer = 0  # outputs
        self._waiting: deque[list[int]] = deque()  # outputs that are in no index yet
        self._num_waiting = 0  # their tokens

    @property
    def num_tokens(self) -> int:
        return len(self.older) + len(self.newer) + self._num_waiting

    def add(self, output: list[int], max_outputs: int) -> None:
        """Keep an output, which must not change any more, until it is indexed. The oldest of too
        many are dropped."""
        self._waiting.append(output)
        self._num_waiting += len(output)
        while len(self._waiting) > max_outputs or self._num_waiting > MAX_TOKENS:
            self._num_waiting -= len(self._waiting.popleft())

    def index(self, max_outputs: int) -> None:
        """Index outputs, about `TOKENS_PER_CALL` tokens at once; about `max_outputs` are kept."""
        num_left = TOKENS_PER_CALL
        while self._waiting and num_left > 0:
            output = self._waiting.popleft()
            self._num_waiting -= len(output)
            num_left -= len(output)
            if 2 * self._num_newer >= max_outputs or 2 * len(self.newer) >= MAX_TOKENS:
                self.older, self.newer, self._num_newer = self.newer, TokenIndex(self._gram), 0
            self.newer.extend([*output[: MAX_TOKENS // 2], END])
            self._num_newer += 1


class SuffixProposer:
    """Looks up the last tokens of a request in itself and in recent outputs."""

    name = "suffix"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._settings = settings
        self._requests = RequestIndexes(settings.lookup_min)
        self._outputs: OrderedDict[str, _Outputs] = OrderedDict()  # by salt; least recent first
        self._num_tokens = 0  # tokens of all salts

    def propose(self, request: Request, count: int) -> Proposal:
        own = self._requests.index(request)
        if own is None:
            return NO_PROPOSAL
        tail = own.tail(self._settings.lookup_max)
        index, match = own, own.find(tail)
        outputs = self._outputs.get(request.spec.salt)
        if outputs is not None:
            outputs.index(self._settings.max_cached_requests)
            for other in (outputs.newer, outputs.older):
                longer = other.find(tail)
                if longer.length > match.length:
                    index, match = other, longer
        count = min(count, int(self._settings.max_spec_factor * match.length))
        if match is NO_MATCH or count == 0:
            return NO_PROPOSAL
        return Proposal(_vote(index, match, count, self._settings.min_token_prob), match.length)

    def forget(self, request: Request) -> None:
        """The request has ended; later requests with its salt may find its output."""
        self._requests.forget(request)
        if not self._settings.max_cached_requests or len(request.output) <= 1:
            return
        salt = request.spec.salt
        outputs = self._outputs.pop(salt, None) or _Outputs(self._settings.lookup_min)
        self._num_tokens -= outputs.num_tokens
        outputs.add(request.output, self._settings.max_cached_requests)
        self._outputs[salt] = outputs
        self._num_tokens += outputs.num_tokens
        while self._num_tokens > MAX_TOKENS and len(self._outputs) > 1:
            _, dropped = self._outputs.popitem(last=False)
            self._num_tokens -= dropped.num_tokens


def _vote(index: TokenIndex, match: Match, count: int, min_share: float) -> tuple[int, ...]:
    """The most frequent continuation of a match, up to a draft with a smaller share."""
    if len(match.ends) == 1:
        return tuple(index.follow(match.ends[0], count))
    sources = [index.follow(end, count) for end in match.ends]
    if all(source == sources[0] for source in sources):  # as in text that repeats itself
        return tuple(sources[0])
    drafts: list[int] = []
    for place in range(count):
        votes = Counter([source[place] for source in sources if len(source) > place])
        if not votes:
            break
        token, num_votes = votes.most_common(1)[0]
        if num_votes < min_share * len(match.ends):
            break
        drafts.append(token)
        sources = [source for source in sources if len(source) > place and source[place] == token]
    return tuple(drafts)
