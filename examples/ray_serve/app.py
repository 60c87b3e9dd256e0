"""A Ray Serve application: an ingress that reads requests, and replicas that serve them.

    serve run examples.ray_serve.app:build model=builtin min_replicas=2

Each replica is a whole server: event loop, scheduler and workers. The ingress reads a request's
body, so that the router can send prompts with the same beginning to the same replica.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from examples.ray_serve.ingress import Request, responses_through
from gateway.serve.embedded import EmbeddedServer, embedded
from gateway.settings.settings import load

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.types import ASGIApp, Message

WAITING_TOKENS = "waiting_tokens"
TARGET_WAITING_TOKENS = 16_384.0  # for each replica; more of them start another one
HEALTH_SECONDS = 10.0


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy: as many replicas as keep the mean waiting tokens at the target.

    One replica fewer only if the tokens of all would fit into half of the target.
    """
    waiting = context.aggregated_metrics.get(WAITING_TOKENS, {}).values()
    total, now = sum(waiting), context.current_num_replicas
    wanted = max(now, -(-int(total) // int(TARGET_WAITING_TOKENS)))
    if (
        now > 1
        and total <= TARGET_WAITING_TOKENS * (now - 1) / 2
        and not context.total_num_requests
    ):
        wanted = now - 1
    bounded = min(
        max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas
    )
    return bounded, {}


@serve.deployment(
    max_ongoing_requests=4096,  # the engine's own queue is bounded; it decides what runs
    graceful_shutdown_timeout_s=60,
    health_check_period_s=HEALTH_SECONDS,
    request_router_config=RequestRouterConfig(
        request_router_class="examples.ray_serve.router.PrefixAffinityRouter"
    ),
)
class Replica:
    """One Podway: the model, its scheduler and workers."""

    async def __init__(self, settings: dict[str, str]) -> None:  # type: ignore[misc] # Ray awaits it
        self._stop = asyncio.Event()
        started: asyncio.Future[EmbeddedServer] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(settings, started))
        await asyncio.wait((started, self._running), return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            await self._running  # raises why the start failed
        self._server = await started

    async def _run(
        self, settings: dict[str, str], started: "asyncio.Future[EmbeddedServer]"
    ) -> None:
        async with embedded(load({"store": "memory", **settings})) as server:
            started.set_result(server)
            await self._stop.wait()

    async def answer(self, request: Request) -> "AsyncIterator[Message]":
        """The ASGI messages of a response. Closing the iterator disconnects the client."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue(maxsize=16)
        body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> "Message":
            if body:
                return body.pop()
            await asyncio.Event().wait()  # cancelled when the client has left
            raise AssertionError

        task = asyncio.ensure_future(self._server.app(request.scope(), receive, messages.put))
        end = asyncio.create_task(_put_when_done(task, messages))
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            for each in (task, end):
                each.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def check_health(self) -> None:
        """`/health`; raises if the workers are lost for good. Ray then replaces the replica."""
        failure = self._server.service.groups.failure
        if failure is not None:
            raise RuntimeError(failure)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `wanted_replicas`."""
        pool = self._server.service.engine.scheduler.pool
        return {WAITING_TOKENS: float(pool.waiting_tokens)}

    async def __del__(self) -> None:
        self._stop.set()
        await self._running


async def _put_when_done(
    task: "asyncio.Future[None]", messages: "asyncio.Queue[Message | None]"
) -> None:
    await asyncio.wait((task,))
    await messages.put(None)


@serve.deployment(max_ongoing_requests=4096)
@serve.ingress()
class Ingress:
    """Reads whole requests and streams the replicas' responses."""

    def __init__(self, replicas: "DeploymentHandle") -> None:
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> "ASGIApp":
        return responses_through(self._replicas.answer.options(stream=True))


def build(arguments: dict[str, str]) -> serve.Application:
    """`arguments` are `min_replicas`, `max_replicas`, `num_cpus`, `num_gpus` of each replica, and
    settings of `podway serve`."""
    settings = dict(arguments)
    smallest = int(settings.pop("min_replicas", "1"))
    largest = int(settings.pop("max_replicas", str(smallest)))
    resources = {name: float(settings.pop(name, "0")) for name in ("num_cpus", "num_gpus")}
    replica, ingress = cast("Any", Replica), cast("Any", Ingress)  # deployments, not classes
    replicas = replica.options(
        ray_actor_options=resources,
        autoscaling_config=AutoscalingConfig(
            min_replicas=smallest,
            initial_replicas=smallest,
            max_replicas=largest,
            policy=AutoscalingPolicy(policy_function=wanted_replicas),
        ),
    )
    return ingress.bind(replicas.bind(settings))
