"""Predecessor: the server that this one succeeds, from the successor's side."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from gateway.serve.upgrade.channel import Channel
from gateway.serve.upgrade.inherited import Inherited


class Predecessor:
    """The former server, which finishes its requests beside this one."""

    def __init__(self, inherited: Inherited, channel: Channel, store: str | None, pid: int) -> None:
        self.listener = inherited.listener
        self.store = None if store is None else Path(store)
        self.pid = pid
        self.secret = ""
        self.models: tuple[str, ...] = ()  # those that it had loaded
        self.released = asyncio.Event()  # it computes nothing of a batch any more
        self.ended = asyncio.Event()
        self.restored = asyncio.Event()  # its held streams can be read here
        self._channel = channel

    @classmethod
    async def join(cls, inherited: Inherited, files: Iterable[Path]) -> "Predecessor | None":
        """The former server, which removes these files if this one does not take over; None if it
        has ended meanwhile."""
        channel = await Channel.over(inherited.channel.dup())
        hello = await channel.receive()
        if hello is None:
            return None
        predecessor = cls(inherited, channel, hello["store"], hello["pid"])
        predecessor.secret = hello["secret"]
        predecessor.models = tuple(hello.get("models", ()))
        if "removes_files" in hello:  # earlier versions do not
            channel.send(files=[str(file) for file in files])
        return predecessor

    @property
    def has_ended(self) -> bool:
        return self.ended.is_set()

    async def take_over(self) -> None:
        """Say that this server is ready, and wait until the former one accepts no more."""
        self._channel.send(ready=True, pid=os.getpid())
        if await self._channel.receive() is None:
            self._end()

    def took_over(self) -> None:
        """Say that this server accepts connections."""
        self._channel.send(taken=True)

    async def follow(self) -> None:
        """Return when the former server has ended."""
        while not self.has_ended:
            message = await self._channel.receive()
            if message is None:
                self._end()
            elif "released" in message:
                self.released.set()

    async def restored_by(self, restore: Callable[[], Awaitable[object]]) -> None:
        """Once the former server has ended, restore its held streams. Requests for them wait."""
        await self.ended.wait()
        try:
            await restore()
        finally:
            self.restored.set()

    def _end(self) -> None:
        self.released.set()
        self.ended.set()
        self._channel.close()
