"""`/health` (liveness), `/ready` (a request would be served now), `/version`, `/metrics`, and
`/v1/loads`: the load of this server for routers, in SGLang's format (smg reads it)."""

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.errors import Unavailable
from engine.loop import Engine
from engine.request import State
from gateway.errors import StoreOutOfSpace
from gateway.groups.group import Serving
from gateway.observe.exposition import CONTENT_TYPE
from gateway.service import caller_of, service_of
from gateway.version import podway_version


async def loads(http: HttpRequest) -> dict[str, Any]:
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


def _load(rank: int, serving: Serving, engine: Engine) -> dict[str, Any]:
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


async def health(http: HttpRequest) -> dict[str, str]:
    """Liveness: raises `Unavailable` if the workers are lost for good, so the server must end."""
    failure = service_of(http).groups.failure
    if failure is not None:
        raise Unavailable(failure)
    return {"status": "ok"}


async def version(http: HttpRequest) -> dict[str, str]:
    """The version, in vLLM's format."""
    return {"version": podway_version()}


async def ready(http: HttpRequest) -> dict[str, str]:
    """Readiness: raises `Unavailable` if requests wait and no iteration has finished lately."""
    service = service_of(http)
    error = service.groups.rejection()
    if error is not None:
        raise error
    if not service.groups.is_ready:
        raise Unavailable("The server is not ready: no iteration has finished for too long.")
    with suppress(StoreOutOfSpace):
        await service.store.database.check_writable()
    store = "writable" if service.store.database.is_writable else "read-only"
    return {"status": "ready", "store": store}


async def metrics(http: HttpRequest) -> Response:
    """All metrics in the Prometheus text format. Requests of other API keys are for admin keys."""
    service, caller = service_of(http), caller_of(http)
    page = await service.exposition.render(None if caller.key.is_admin else caller.tenant)
    return Response(page, media_type=CONTENT_TYPE)
