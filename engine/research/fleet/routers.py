"""The routers by name. Each is made with the loads, the replicas' cost model, and the number of
named blocks that fit into a replica's KV cache."""

from typing import TYPE_CHECKING

from engine.research.fleet.router import LeastForecast, LeastTokens, PrefixAffinity, RoundRobin
from engine.research.fleet.smg import SmgCacheAware

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.cost.model import CostModel
    from engine.research.fleet.router import Loads, Router

ROUTERS: "dict[str, Callable[[Loads, CostModel, int], Router]]" = {
    "round-robin": RoundRobin,
    "least-tokens": LeastTokens,
    "prefix": PrefixAffinity,
    "smg-cache-aware": SmgCacheAware,
    "forecast": LeastForecast,
}
FORECASTING = frozenset({"forecast"})  # routers that use `LoadReport.delay`
