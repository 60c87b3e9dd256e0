"""The HTTP API as an ASGI app inside another server, for instance a replica of Ray Serve.

    async with embedded(load({"model": "builtin"})) as server:
        await server.app(scope, receive, send)

Engine and batches run on the caller's event loop, workers in processes. Signals, the listening
socket and TLS are left to the other server.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from starlette.types import ASGIApp

from gateway.serve.assemble import (
    build_models,
    build_server,
    build_service,
    build_store,
    load_at_start,
)
from gateway.serve.load import OnProgress, served_name
from gateway.serve.tls import load_credentials
from gateway.service import Service
from gateway.settings.checks import check_settings
from gateway.settings.settings import Settings


class EmbeddedServer(NamedTuple):
    """A running app, and the service that its routes use."""

    app: ASGIApp
    service: Service


@asynccontextmanager
async def embedded(
    settings: Settings, progress: OnProgress = lambda what, done, total: None
) -> AsyncIterator[EmbeddedServer]:
    """Load the models and run their engines inside the block.

    At the end, new requests get a 503 and running ones may finish within `--drain-seconds`. Raises
    `StartupError`.
    """
    check_settings(settings)
    async with AsyncExitStack() as stack:
        models = build_models(settings, stack, progress=progress)
        await load_at_start(models)
        store = build_store(settings, served_name(settings.deployments[0]))
        stack.callback(store.close)
        credentials = load_credentials(settings)
        service = build_service(settings, models, credentials, store)
        server = build_server(settings, service, credentials)
        async with asyncio.TaskGroup() as group:
            batching = group.create_task(server.runner.run())
            running = [group.create_task(each.run()) for each in (service.groups, service.watch)]
            restore_more = await server.restore()
            running.append(group.create_task(restore_more()))
            try:
                yield EmbeddedServer(server.app, service)
            finally:
                batching.cancel()  # unfinished lines run after the next start
                await service.groups.drain(settings.http.drain_seconds)
                await service.store.held.close()
                for task in running:
                    task.cancel()
