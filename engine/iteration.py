"""One iteration of the scheduler: the message for the workers, the requests it is for, and the
events that observers get: metrics, recordings and traces are observers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat, starmap
from math import inf
from typing import NamedTuple, TypeVar

from engine.policy.base import Policy
from engine.request import Request
from engine.step import BlockMove, Page, Step, StepResult, Tier, TokenLogprobs

Handler = Callable[..., None]

T = TypeVar("T")


class SampledToken(NamedTuple):
    """A token of a step's result."""

    token: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Iteration:
    """A `Step` and its requests, in the order of the step's entries.

    `swapping` are requests without an entry whose KV the step's moves copy. `saves` are copies of
    cached blocks that the step makes, `loads` copies of cached blocks that it reads for requests.
    `itl_goal` is the lowest goal of its decodes in seconds; infinite if none has one. One that
    `only_saves` was planned while there were no requests.
    """

    step: Step
    requests: tuple[Request, ...]
    swapping: tuple[Request, ...] = ()
    saves: "tuple[Save, ...]" = ()
    loads: "tuple[Load, ...]" = ()
    itl_goal: float = inf
    only_saves: bool = False

    def may_go_ahead(self) -> dict[Request, None]:
        """The requests that may be planned ahead while it is in flight, in the order of its
        entries. KV that it loads might not be readable."""
        loading = {load.request for load in self.loads}
        return dict.fromkeys(r for r in self.requests if r.may_go_ahead and r not in loading)

    def results(self, result: StepResult) -> "EntryResults":
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

    def _by_entry(self, values: Sequence[T | None]) -> Sequence[T | None]:
        """One value for each entry: None for those that sample no token."""
        left = iter(values)
        return [None if entry.sample is None else next(left) for entry in self.step.entries]

    def _drafted(
        self, result: StepResult
    ) -> tuple[list[SampledToken], dict[Request, tuple[SampledToken, ...]]]:
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

    tokens: Sequence[int | None]
    logprobs: Sequence[TokenLogprobs | None]
    drafted: dict[Request, tuple[SampledToken, ...]]
    vectors: dict[Request, bytes]


class Save(NamedTuple):
    """A copy of a cached page of the device to a slot of a tier below."""

    tier: Tier
    page: Page
    slot: int
    name: bytes


class Load(NamedTuple):
    """A page in a tier below that is read into a page of a request."""

    request: Request
    tier: Tier
    page: Page
    name: bytes


class Swaps(NamedTuple):
    """KV moves of an iteration, and what they are for (see `Iteration`)."""

    moves: tuple[BlockMove, ...]
    requests: tuple[Request, ...]
    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()


NO_SWAPS = Swaps((), ())


class Delivery(NamedTuple):
    """A sampled token for a request that has not been cancelled. `token` is None if the request
    failed in this iteration, or finished with a vector."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None = None


class Observer:
    """Called synchronously by the scheduler, after the event. Each public method is an event, and
    does nothing unless a subclass overrides it. It must not wait, raise, or change what it is
    passed."""

    def arrived(self, request: Request, now: float) -> None:
        """The request was accepted."""

    def withdrawn(self, request: Request, now: float) -> None:
        """The waiting request goes to the scheduler of another replica."""

    def adopted(self, request: Request, now: float) -> None:
        """The waiting request has come from the scheduler of another replica."""

    def planned(self, iteration: Iteration, now: float) -> None:
        """The iteration is about to be sent to the workers."""

    def idled(self, now: float) -> None:
        """There are live requests, but none of them could be planned."""

    def committed(self, iteration: Iteration, seconds: float, now: float) -> None:
        """The iteration's result was applied. `seconds`: the worker's own time for the step."""

    def failed(self, iteration: Iteration, now: float) -> None:
        """The step raised an error; its requests end next."""

    def preempted(self, request: Request, now: float) -> None:
        """The request's KV was dropped, to be recomputed."""

    def swapped(self, request: Request, move: BlockMove, now: float) -> None:
        """The next step swaps the request's KV out or in. An awaited move is made because blocks
        are short now, any other one ahead of need."""

    def cancelled(self, request: Request, now: float) -> None:
        """The request ends for the reason in its `abort`: now, or when its iteration returns."""

    def ended(self, request: Request, now: float) -> None:
        """The request reached its terminal state; reported exactly once per request."""

    def freed(self, request: Request, iterations: int) -> None:
        """A cancelled request's KV is free, `iterations` iterations after it was cancelled."""

    def worker_lost(self, now: float) -> None:
        """A worker died: all KV is lost."""

    def given_up(self, now: float) -> None:
        """No live request can be served any more; all of them end next."""

    def switched(self, policy: Policy, now: float) -> None:
        """`policy` replaced the policy that was in force."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class ObserverGroup(Observer):
    """Reports each event to several observers, in their order.

    The methods of its events are made with it: each calls those observers that override the event,
    and nothing else.
    """

    def __init__(self, *observers: Observer) -> None:
        for event in EVENTS:
            handlers = [getattr(one, event) for one in observers if _overrides(one, event)]
            if handlers:
                setattr(self, event, handlers[0] if len(handlers) == 1 else _calling(handlers))


def _overrides(observer: Observer, event: str) -> bool:
    if isinstance(observer, ObserverGroup):
        return event in vars(observer)
    return getattr(type(observer), event, None) is not getattr(Observer, event)


def _calling(handlers: Sequence[Handler]) -> Handler:
    """A function that calls all of them with its arguments."""

    def call_all(*event: object) -> None:
        for handler in handlers:
            handler(*event)

    return call_all
