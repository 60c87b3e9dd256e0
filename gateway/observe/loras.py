"""Requests of LoRA adapters: the live ones, for unloading and vLLM's gauge, and tokens."""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from engine.events import Observer

if TYPE_CHECKING:
    from engine.request import Request


class LoraUsage(Observer):
    """Counts the requests of each adapter."""

    def __init__(self, max_loras: int = 0) -> None:
        """`max_loras` is the largest number of adapters that may be loaded at once."""
        self.max_loras = max_loras
        self.tokens: Counter[tuple[str, str]] = Counter()  # by name, "" for the base, and kind
        self.tokens.update({("", "prompt"): 0, ("", "output"): 0})
        self._live: Counter[int] = Counter()  # requests, by id
        self._idle: dict[int, asyncio.Event] = {}  # awaited, by id

    def arrived(self, request: "Request", now: float) -> None:
        if (lora := request.spec.lora) is not None:
            self._live[lora.lora_id] += 1

    def ended(self, request: "Request", now: float) -> None:
        """Count its tokens; the last request of an adapter ends `wait_until_idle`."""
        lora = request.spec.lora
        name = "" if lora is None else lora.name
        self.tokens[name, "prompt"] += request.spec.own_len
        self.tokens[name, "output"] += request.produced
        if lora is None:
            return
        self._live[lora.lora_id] -= 1
        if not self._live[lora.lora_id]:
            del self._live[lora.lora_id]
            if (idle := self._idle.get(lora.lora_id)) is not None:
                idle.set()

    def num_live(self, lora_id: int) -> int:
        """Requests of an adapter that have not ended."""
        return self._live[lora_id]

    async def wait_until_idle(self, lora_id: int) -> None:
        """Wait until no live request uses the adapter; no new one may be accepted meanwhile."""
        if self.num_live(lora_id):
            idle = self._idle.setdefault(lora_id, asyncio.Event())
            await idle.wait()
            self._idle.pop(lora_id, None)
