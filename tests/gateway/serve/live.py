"""The rig on a real port: uvicorn under uvloop in a thread of its own."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import uvloop

from gateway.serve.connection import ConnectionBounds, Retirement
from gateway.serve.server import Server, Signals, bind
from gateway.store.database import StoreThread
from tests.gateway.rig import Rig, Setting, build_rig
from tests.wire.response_check import CheckedApp


@dataclass(frozen=True, slots=True)
class Live:
    """A listening server; `stop` tells it to drain, as SIGTERM does."""

    port: int
    rig: Rig
    loop: asyncio.AbstractEventLoop
    signals: Signals

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.signals.stop.set)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextmanager
def listening(
    setting: Setting,
    drain_seconds: float = 10.0,
    tls: ssl.SSLContext | None = None,
    bounds: ConnectionBounds | None = None,
) -> Iterator[Live]:
    """Serve in a thread; afterwards no request lives, every slot is free, the port is closed."""
    ready = threading.Event()
    born: list[Live] = []
    checked: list[CheckedApp] = []

    async def main() -> None:
        rig, signals = build_rig(replace(setting, store_executor=StoreThread)), Signals()
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            born.append(Live(port, rig, asyncio.get_running_loop(), signals))
            checked.append(CheckedApp(rig.app))
            server = Server(
                app=checked[0],
                service=rig.service,
                runner=rig.runner,
                drain_seconds=drain_seconds,
                bounds=(bounds or ConnectionBounds())._replace(retirement=Retirement()),
                tls=tls,
            )
            with closing(rig.service.store):
                await server.serve(listener, signals, ready.set)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(30), "the server did not start"
        yield born[0]
    finally:
        if born:
            born[0].stop()
        thread.join(30)
    assert not thread.is_alive(), "the server did not stop"
    assert checked[0].complaints == []
    scheduler = born[0].rig.engine.scheduler
    assert not scheduler.pool
    assert scheduler.ledger.num_held == 0
