"""The routers by name. Each is made with the loads, the replicas' cost model, and the number of
named blocks that fit into a replica's KV cache."""

from collections.abc import Callable

from engine.cost.model import CostModel
from engine.research.fleet.router import (
    LeastForecast,
    LeastTokens,
    Loads,
    PrefixAffinity,
    RoundRobin,
    Router,
)
from engine.research.fleet.smg import SmgCacheAware

ROUTERS: dict[str, Callable[[Loads, CostModel, int], Router]] = {
    "round-robin": RoundRobin,
    "least-tokens": LeastTokens,
    "prefix": PrefixAffinity,
    "smg-cache-aware": SmgCacheAware,
    "forecast": LeastForecast,
}
FORECASTING = frozenset({"forecast"})  # routers that use `LoadReport.delay`
