"""`GET /v1/loads`: the load of this server for routers, in SGLang's format (smg reads it)."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gateway.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest


async def loads(http: "HttpRequest") -> dict[str, Any]:
    """Requests and KV slots; one entry, since a server is one data-parallel rank."""
    service = service_of(http)
    scheduler = service.engine.scheduler
    pool, shape, settings = scheduler.pool, scheduler.kv.shape, scheduler.settings
    running, waiting = pool.num_admitted, service.readings.num_waiting
    used = service.readings.num_used_blocks * shape.block_size
    usage = used / shape.num_slots
    prefix_tokens = service.readings.prefix_tokens
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": used,
        "num_total_tokens": used + pool.waiting_tokens,
        "max_total_num_tokens": shape.num_slots,
        "token_usage": usage,
        "gen_throughput": scheduler.cost.tokens_per_second if running else 0.0,
        "cache_hit_rate": prefix_tokens["hit"] / max(1, sum(prefix_tokens.values())),
        "utilization": running / settings.max_batch_size,
        "max_running_requests": settings.max_batch_size,
    }
    return {
        "timestamp": datetime.fromtimestamp(service.unix_now(), UTC).isoformat(),
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": {
            "total_running_reqs": running,
            "total_waiting_reqs": waiting,
            "total_reqs": running + waiting,
            "avg_token_usage": usage,
            "avg_throughput": load["gen_throughput"],
            "avg_utilization": load["utilization"],
        },
    }
