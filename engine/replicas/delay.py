"""QueueDelay: the forecast by how much later a new request ends than on an idle replica."""

from itertools import islice
from typing import TYPE_CHECKING

from engine.events import Observer
from engine.policy.forecast import MAX_SAMPLED, Forecast
from engine.request import State

if TYPE_CHECKING:
    from engine.cost.model import CostModel
    from engine.pool import RequestPool
    from engine.ports import Cost
    from engine.request import Request

WAITING = State.WAITING


class QueueDelay(Observer):
    """Learns from the requests that end how long outputs are. `seats`: requests in a batch."""

    def __init__(self, cost: "Cost", seats: int) -> None:
        self._forecast = Forecast(cost, seats)

    def ended(self, request: "Request", now: float) -> None:
        self._forecast.ended(request)

    def seconds(self, pool: "RequestPool", model: "CostModel", now: float) -> float:
        """The forecast for these live requests; 0 if there are none."""
        if not pool:
            return 0.0
        forecast, running, count = self._forecast, len(pool.started), pool.count(WAITING)
        slots = sum([request.num_tokens for request in pool.started])
        pace = model.tokens(running) + model.per_slot * slots
        forecast.observe(pace, now)
        spec = next(iter(pool)).spec
        decodes = forecast.decodes_left(spec, 0)
        prefill = [request for request in pool.started if request.remaining > 1]
        seconds = decodes * max(0.0, pace - forecast.pace_alone(spec))
        seconds += forecast.wait(prefill, len(prefill))
        if count:  # they wait for KV, so for the ends of running ones
            waiting = (request for request in pool if request.state is WAITING)
            seconds += forecast.wait(list(islice(waiting, MAX_SAMPLED)), count)
            seconds += decodes * pace * count / max(1, running)
        return seconds
