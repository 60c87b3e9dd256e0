"""A `LoraLoader` without workers: the digest of an adapter is that of its path."""

import asyncio
from collections.abc import Callable
from hashlib import sha256

from engine.errors import WorkerLost
from engine.lora import LoraReport, LoraSpec

LOAD_SECONDS = 0.1


class ScriptedLoader:
    """A path with "bad" cannot be loaded; with "lost" the worker dies meanwhile."""

    def __init__(self) -> None:
        self.loaded: dict[int, LoraSpec] = {}
        self.lose: Callable[[LoraReport], object] = print

    async def load_lora(self, spec: LoraSpec) -> LoraReport:
        await asyncio.sleep(LOAD_SECONDS)
        if "lost" in spec.path:
            raise WorkerLost("the worker was killed")
        if "bad" in spec.path:
            return LoraReport(spec.lora_id, error=f"LoRA adapter {spec.name!r}: bad file")
        self.loaded[spec.lora_id] = spec
        return LoraReport(spec.lora_id, digest=sha256(spec.path.encode()).hexdigest())

    def unload_lora(self, lora_id: int) -> None:
        del self.loaded[lora_id]

    def watch_loras(self, on_lost: Callable[[LoraReport], object]) -> None:
        self.lose = on_lost
