"""Fair shares between tenants: the virtual token counter (VTC; Sheng et al., OSDI 2024).

Each tenant has a counter of the tokens computed for it; the tenant with the smallest counter goes
first. The counter of a tenant that comes back is lifted to the smallest counter of the active
tenants, so that absence earns no credit. Within a tenant, first come, first served, or the order of
any other policy (`PolicySettings.fair_keys`), of which each tenant has an instance.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heapreplace

from engine.policy.base import Policy, PolicyBase, Preemption, SortKey
from engine.policy.fcfs import FirstComeFirstServed
from engine.policy.settings import PolicySettings
from engine.ports import Cost
from engine.request import Request, RequestSpec


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    index: int  # breaks ties between equal counters
    counter: float
    order: Policy  # the order of its requests
    num_live: int = 0


class VirtualTokenCounter(PolicyBase):
    """Tokens served per tenant, weighted by input and output and by the tenant's own weight.

    Prompt tokens found in the cache cost nothing; tokens computed again after a preemption do.
    """

    preemption = Preemption.NEVER

    def __init__(
        self,
        cost: Cost | None = None,
        settings: PolicySettings | None = None,
        make: Callable[[], Policy] | None = None,
    ) -> None:
        """`make` makes an empty policy, which orders the requests of one tenant; default: first
        come, first served."""
        self._settings = settings or PolicySettings()
        self._make = make or partial(FirstComeFirstServed, settings=self._settings)
        self._active: dict[str, _Tenant] = {}
        self._absent: dict[str, float] = {}  # counters that are ahead of the floor
        self._last_counter = 0.0  # the counter of the last tenant that left
        self._num_tenants = 0

    def arrive(self, request: Request, now: float) -> None:
        assert request.spec.weight > 0.0, "a tenant's share is positive"
        name = request.spec.tenant
        tenant = self._active.get(name)
        if tenant is None:
            counter = self._lifted(name)
            tenant = self._active[name] = _Tenant(name, self._num_tenants, counter, self._make())
            self._num_tenants += 1
        tenant.num_live += 1
        tenant.order.arrive(request, now)

    def validate(self, spec: RequestSpec, num_tokens: int, now: float) -> None:
        tenant = self._active.get(spec.tenant)
        order = self._make() if tenant is None else tenant.order
        order.validate(spec, num_tokens, now)

    def found(self, request: Request, num_tokens: int) -> bool:
        return self._active[request.spec.tenant].order.found(request, num_tokens)

    def start(self, request: Request) -> None:
        self._active[request.spec.tenant].order.start(request)

    def _lifted(self, name: str) -> float:
        """The counter of a tenant that comes back. Forgets counters that would be lifted anyway."""
        floor = min((t.counter for t in self._active.values()), default=self._last_counter)
        counter = max(floor, self._absent.pop(name, floor))
        self._absent = {other: ahead for other, ahead in self._absent.items() if ahead > floor}
        return counter

    def ran(self, request: Request, num_tokens: int, seconds: float, now: float) -> None:
        is_decode = num_tokens == 1 and bool(request.output) and not request.remaining
        tenant = self._active[request.spec.tenant]
        tenant.counter += self._charge(request, num_tokens, is_decode)
        tenant.order.ran(request, num_tokens, seconds, now)

    def leave(self, request: Request, now: float) -> None:
        tenant = self._active[request.spec.tenant]
        tenant.order.leave(request, now)
        tenant.num_live -= 1
        if not tenant.num_live:
            del self._active[tenant.name]
            self._absent[tenant.name] = self._last_counter = tenant.counter

    def order(self, now: float) -> Iterator[Request]:
        """Always the next request of the tenant whose counter would be smallest by then."""
        heap = [(t.counter, t.index, t.order.order(now)) for t in self._active.values()]
        heapify(heap)
        while len(heap) > 1:
            counter, index, queue = heap[0]
            request = next(queue, None)
            if request is None:
                heappop(heap)
                continue
            yield request
            heapreplace(heap, (counter + self._charge_of_remaining(request), index, queue))
        if heap:
            yield from heap[0][2]

    def sort_keys(self, requests: Sequence[Request], now: float) -> list[SortKey]:
        """The counters of the tenants when these requests are next, as in `order`."""
        wanted: dict[str, set[Request]] = {}
        for request in requests:
            wanted.setdefault(request.spec.tenant, set()).add(request)
        keys: dict[Request, SortKey] = {}
        for name, others in wanted.items():
            tenant = self._active[name]
            counter = tenant.counter
            for place, request in enumerate(tenant.order.order(now)):
                if request in others:
                    keys[request] = (counter, tenant.index, place)
                    others.discard(request)
                    if not others:
                        break
                counter += self._charge_of_remaining(request)
        return [keys[request] for request in requests]

    def counter(self, tenant: str) -> float:
        """Weighted tokens counted for a tenant with live requests."""
        return self._active[tenant].counter

    def _charge_of_remaining(self, request: Request) -> float:
        is_decode = request.remaining == 1 and bool(request.output)
        return self._charge(request, request.remaining, is_decode)

    def _charge(self, request: Request, num_tokens: int, is_decode: bool) -> float:
        settings = self._settings
        weight = settings.output_weight if is_decode else settings.input_weight
        return num_tokens * weight / request.spec.weight
