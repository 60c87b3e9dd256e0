"""One iteration of the scheduler: the message for the workers, and the requests it is for."""

from dataclasses import dataclass
from itertools import islice, repeat, starmap
from math import inf
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.request import Request
    from engine.step import BlockMove, Page, Step, StepResult, Tier, TokenLogprobs

T = TypeVar("T")


class SampledToken(NamedTuple):
    """A token of a step's result."""

    token: int
    logprobs: "TokenLogprobs | None"


@dataclass(frozen=True, slots=True)
class Iteration:
    """A `Step` and its requests, in the order of the step's entries.

    `swapping` are requests without an entry whose KV the step's moves copy. `saves` are copies of
    cached blocks that the step makes, `loads` copies of cached blocks that it reads for requests.
    `itl_goal` is the lowest goal of its decodes in seconds; infinite if none has one. One that
    `only_saves` was planned while there were no requests.
    """

    step: "Step"
    requests: "tuple[Request, ...]"
    swapping: "tuple[Request, ...]" = ()
    saves: "tuple[Save, ...]" = ()
    loads: "tuple[Load, ...]" = ()
    itl_goal: float = inf
    only_saves: bool = False

    def results(self, result: "StepResult") -> "EntryResults":
        """What `result` has for each of the entries."""
        tokens: Sequence[int | None] = result.tokens
        logprobs: Sequence[TokenLogprobs | None] = result.logprobs
        drafted: dict[Request, tuple[SampledToken, ...]] = {}
        if result.num_accepted:
            first, drafted = self._drafted(result)
            tokens, logprobs = zip(*first, strict=True)
        num_entries = len(self.requests)
        if len(tokens) < num_entries:
            tokens = self._by_entry(tokens)
            logprobs = logprobs and self._by_entry(logprobs)
        logprobs = logprobs or (None,) * num_entries
        vectors: dict[Request, bytes] = {}
        if result.vectors:
            rows = zip(self.step.entries, self.requests, strict=True)
            pooled = [request for entry, request in rows if entry.pooling is not None]
            vectors = dict(zip(pooled, result.vectors, strict=True))
        return EntryResults(tokens, logprobs, drafted, vectors)

    def _by_entry(self, values: "Sequence[T | None]") -> "Sequence[T | None]":
        """One value for each entry: None for those that sample no token."""
        left = iter(values)
        return [None if entry.sample is None else next(left) for entry in self.step.entries]

    def _drafted(
        self, result: "StepResult"
    ) -> "tuple[list[SampledToken], dict[Request, tuple[SampledToken, ...]]]":
        """The first token of each entry that samples, and all tokens of those with drafts."""
        pairs = zip(result.tokens, result.logprobs or repeat(None), strict=False)
        tokens = starmap(SampledToken, pairs)
        num_accepted = iter(result.num_accepted)
        first: list[SampledToken] = []
        drafted: dict[Request, tuple[SampledToken, ...]] = {}
        for entry, request in zip(self.step.entries, self.requests, strict=True):
            if entry.sample is not None:
                first.append(next(tokens))
            if entry.num_drafts:
                drafted[request] = (first[-1], *islice(tokens, next(num_accepted)))
        return first, drafted


class EntryResults(NamedTuple):
    """The first token of each entry and its log-probabilities, None if it samples none; the tokens
    of requests with drafts: the first one, and one for each accepted draft; the vectors of requests
    that are pooled."""

    tokens: "Sequence[int | None]"
    logprobs: "Sequence[TokenLogprobs | None]"
    drafted: "dict[Request, tuple[SampledToken, ...]]"
    vectors: "dict[Request, bytes]"


class Save(NamedTuple):
    """A copy of a cached page of the device to a slot of a tier below."""

    tier: "Tier"
    page: "Page"
    slot: int
    name: bytes


class Load(NamedTuple):
    """A page in a tier below that is read into a page of a request."""

    request: "Request"
    tier: "Tier"
    page: "Page"
    name: bytes


class Swaps(NamedTuple):
    """KV moves of an iteration, and what they are for (see `Iteration`)."""

    moves: "tuple[BlockMove, ...]"
    requests: "tuple[Request, ...]"
    saves: "tuple[Save, ...]" = ()
    loads: "tuple[Load, ...]" = ()


NO_SWAPS = Swaps((), ())


class Delivery(NamedTuple):
    """A sampled token for a request that has not been cancelled. `token` is None if the request
    failed in this iteration, or finished with a vector."""

    request: "Request"
    token: int | None
    logprobs: "TokenLogprobs | None" = None
