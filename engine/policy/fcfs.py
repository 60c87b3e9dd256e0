"""First come, first served at iteration level (Orca, section 4.1 and algorithm 1), between clients
by fair queueing.

The requests of one client are served in the order of their arrival, and so are all requests if only
one client has any. Several clients share the tokens of prompts, so that a request waits neither for
the queue of another client nor for all of a long prompt that came before. Virtual time is the
tokens that a client gets if all clients with prompts to compute have equal shares. A prompt has the
virtual time at which its last token is due (weighted fair queueing; Demers et al., SIGCOMM 1989):
prompts of equal length are computed one after another, and a short one goes before what is left of
a long one. Tokens in the cache cost nothing; until the cache was searched for a waiting prompt, it
has the virtual time of its client's prompts before it, or of its arrival if that is later
(start-time fair queueing; Goyal et al., SIGCOMM 1996). Requests whose prompts are computed come
first, client by client, but for those behind a prompt of their own client.

If there are more requests than seats, each client has an equal share of the seats: its requests
beyond that are behind those of all clients, a second one before another client's third. So a client
whose long outputs have all seats keeps no other waiting; the last of them pause, with their KV.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from engine.policy.base import PolicyBase, Preemption, SortKey
from engine.policy.settings import PolicySettings
from engine.ports import Cost
from engine.request import Request

Queue = Iterator[tuple[float, Request]]
Head = tuple[float, int, Request, Queue]

BEHIND = 2.0**50  # fixed: later than each virtual time, which is a number of tokens


@dataclass(slots=True, eq=False)
class _Prompt:
    """The prompt of a live request, of which `tokens` are to be computed."""

    client: "_Client"
    tokens: int
    is_known: bool = False  # what of it is cached


@dataclass(slots=True, eq=False)
class _Client:
    """A client with live requests, in the order of their arrival; None for a prompt that is
    computed."""

    number: int
    live: OrderedDict[Request, _Prompt | None] = field(default_factory=OrderedDict)
    num_prompts: int = 0
    served: float = 0.0  # the virtual time up to which its prompts are computed
    place: tuple[float, int] | None = None  # its first request's place in `_places`

    def in_order(self, share: int) -> Iterator[tuple[float, Request]]:
        """The requests with their virtual times, which do not decrease; the client has `share`
        seats."""
        key, end = 0.0, self.served
        for index, (request, prompt) in enumerate(self.live.items()):
            if index >= share:
                yield BEHIND + index, request
                continue
            if prompt is not None:
                start, end = end, end + prompt.tokens
                key = max(key, end if prompt.is_known else start)
            yield key, request


class FirstComeFirstServed(PolicyBase):
    """The order of arrival, and fair queueing between clients. Does not use the cost."""

    preemption = Preemption.NEVER

    def __init__(self, cost: Cost | None = None, settings: PolicySettings | None = None) -> None:
        self._seats = (settings or PolicySettings()).seats
        self._num_live = 0
        self._clients: dict[str, _Client] = {}  # with live requests, by name
        self._prompts: dict[Request, _Prompt] = {}  # those that are not computed
        self._started: dict[Request, _Prompt] = {}  # those of them that have KV
        self._places: list[tuple[float, int, _Client]] = []  # sorted
        self._moved: dict[_Client, None] = {}  # clients whose place may have changed
        self._num_sharing = 0  # clients with prompts
        self._num_clients = 0  # clients that ever came
        self._time = 0.0  # virtual

    def arrive(self, request: Request, now: float) -> None:
        client = self._clients.get(request.spec.client)
        if client is None:
            client = self._clients[request.spec.client] = _Client(self._num_clients)
            self._num_clients += 1
        if not client.num_prompts:
            self._num_sharing += 1
            client.served = max(client.served, self._time)
        self._num_live += 1
        client.num_prompts += 1
        client.live[request] = self._prompts[request] = _Prompt(client, request.remaining)
        self._moved[client] = None

    def found(self, request: Request, num_tokens: int) -> bool:
        prompt = self._prompts.get(request)
        if prompt is None:
            return True
        client, was_placed = prompt.client, prompt.is_known or self._num_sharing == 1
        prompt.tokens, prompt.is_known = num_tokens, True
        self._moved[client] = None
        if was_placed:
            return True
        due = next(time for time, other in client.in_order(self._share) if other is request)
        return all(
            (due, client.number) <= (each.client.served + each.tokens, each.client.number)
            for each in self._started.values()
            if each.client is not client
        )

    def start(self, request: Request) -> None:
        prompt = self._prompts.get(request)
        if prompt is not None:
            prompt.tokens, prompt.is_known = request.remaining, True
            self._started[request] = prompt
            self._moved[prompt.client] = None

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        prompt = self._prompts.get(request)
        if prompt is None:
            return
        prompt.tokens = request.remaining
        prompt.client.served += num_tokens
        self._time += num_tokens / self._num_sharing
        self._moved[prompt.client] = None
        if not prompt.tokens:
            self._end(request)
            prompt.client.live[request] = None

    def leave(self, request: Request, now: float) -> None:
        client = self._clients[request.spec.client]
        self._end(request)
        del client.live[request]
        self._num_live -= 1
        self._moved[client] = None
        if not client.live:
            del self._clients[request.spec.client]

    def order(self, now: float) -> Iterator[Request]:
        self._place()
        if len(self._places) == 1:
            return iter(self._places[0][2].live)
        return self._merged()

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        """The virtual time of a request, its client's number, and its place among the client's."""
        wanted: dict[str, set[Request]] = {}
        for request in requests:
            wanted.setdefault(request.spec.client, set()).add(request)
        keys: dict[Request, SortKey] = {}
        for name, others in wanted.items():
            client = self._clients[name]
            for at, (time, request) in enumerate(client.in_order(self._share)):
                if request in others:
                    keys[request] = (time, client.number, at)
                    others.discard(request)
                    if not others:
                        break
        return [keys[request] for request in requests]

    @property
    def _share(self) -> int:
        """The seats of each client if there are more requests than seats, else all."""
        if self._num_live <= self._seats:
            return self._seats
        return max(1, self._seats // len(self._clients))

    def _end(self, request: Request) -> None:
        """The prompt is computed, or will not be."""
        self._started.pop(request, None)
        prompt = self._prompts.pop(request, None)
        if prompt is not None:
            prompt.client.num_prompts -= 1
            self._num_sharing -= not prompt.client.num_prompts

    def _place(self) -> None:
        """Put the clients in the order of their first requests."""
        for client in self._moved:
            if client.place is not None:
                del self._places[bisect_left(self._places, client.place)]
                client.place = None
            first = next(client.in_order(1), None)
            if first is not None:
                client.place = (first[0], client.number)
                insort(self._places, (*client.place, client))
        self._moved.clear()

    def _merged(self) -> Iterator[Request]:
        """The requests of all clients in the order of their virtual times."""
        heap: list[Head] = []
        share = self._share
        for time, number, client in self._places:
            while heap and heap[0] < (time, number):
                yield _next(heap)
            if not client.num_prompts and len(client.live) <= share:
                yield from client.live
                continue
            queue = client.in_order(share)
            yield next(queue)[1]
            _push(heap, number, queue)
        while heap:
            yield _next(heap)


def _push(heap: list[Head], number: int, queue: Queue) -> None:
    head = next(queue, None)
    if head is not None:
        heappush(heap, (head[0], number, head[1], queue))


def _next(heap: list[Head]) -> Request:
    _, number, request, queue = heappop(heap)
    _push(heap, number, queue)
    return request
