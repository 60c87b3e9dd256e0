"""`GET /v1/loads`: the load of this server for routers, in SGLang's format (smg reads it)."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from engine.request import State
from gateway.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from engine.loop import Engine
    from gateway.groups.group import Serving


async def loads(http: "HttpRequest") -> dict[str, Any]:
    """Requests and KV slots, with one entry for each replica of each model that is loaded."""
    service = service_of(http)
    loaded = service.groups.loaded
    engines = [(serving, engine) for serving in loaded for engine in serving.engine.engines]
    loads = [_load(rank, *each) for rank, each in enumerate(engines)]
    num_loads = max(1, len(loads))
    return {
        "timestamp": datetime.fromtimestamp(service.unix_now(), UTC).isoformat(),
        "dp_rank_count": len(loads),
        "loads": loads,
        "aggregate": {
            "total_running_reqs": sum(load["num_running_reqs"] for load in loads),
            "total_waiting_reqs": sum(load["num_waiting_reqs"] for load in loads),
            "total_reqs": sum(load["num_total_reqs"] for load in loads),
            "avg_token_usage": sum(load["token_usage"] for load in loads) / num_loads,
            "avg_throughput": sum(load["gen_throughput"] for load in loads) / num_loads,
            "avg_utilization": sum(load["utilization"] for load in loads) / num_loads,
        },
    }


def _load(rank: int, serving: "Serving", engine: "Engine") -> dict[str, Any]:
    """The load of a replica; its `cache_hit_rate` is that of all replicas of the model."""
    scheduler = engine.scheduler
    pool, shape, settings = scheduler.pool, scheduler.kv.shape, scheduler.settings
    running, waiting = pool.num_admitted, pool.count(State.WAITING)
    used = scheduler.kv_counts.num_used * shape.block_size
    prefix_tokens = serving.readings.prefix_tokens
    return {
        "dp_rank": rank,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + pool.waiting_tokens,
        "max_total_num_tokens": shape.num_slots,
        "token_usage": used / shape.num_slots,
        "gen_throughput": scheduler.cost.tokens_per_second if running else 0.0,
        "cache_hit_rate": prefix_tokens["hit"] / max(1, sum(prefix_tokens.values())),
        "utilization": running / settings.max_batch_size,
        "max_running_requests": settings.max_batch_size,
    }
