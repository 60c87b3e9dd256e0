"""What fails. Each fault is over when its function returns; the server must be as before."""

import asyncio
import itertools
import os
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import psutil

WORKER = "podway-worker"
POLICIES = ("mlfq", "fair", "priority", "deadline", "fcfs")
CORES = os.cpu_count() or 1
BURN = "import time\nuntil = time.monotonic() + 3\nwhile time.monotonic() < until: pass"


class Faults:
    """Causes one fault after the other, each drawn at random."""

    def __init__(
        self, server: psutil.Process, session: aiohttp.ClientSession, url: str, lora: Path
    ) -> None:
        """`lora` is an adapter that no client asks for."""
        self.counts: Counter[str] = Counter()
        self._server = server
        self._session = session
        self._url = url
        self._lora = lora
        self._policies = itertools.cycle(POLICIES)
        self.all: dict[str, Callable[[], Awaitable[object]]] = {
            "worker killed": self._kill_worker,
            "worker stopped for 2 s": self._stop_worker,
            "grammar process killed": self._kill_helper,
            "grammar process stopped for 2 s": self._stop_helper,
            "worker cannot write files for 3 s": self._full_disk_of_worker,
            "server cannot write files for 3 s": self._full_disk_of_server,
            "policy switched": self._switch_policy,
            "LoRA adapter loaded and unloaded": self._swap_lora,
            "keys and certificates read again (SIGHUP)": self._hang_up,
            "all cores busy for 3 s": self._burn,
            "a text of 4 MB refused": self._send_long_text,
        }

    async def run(self, every: float, seconds: float, chance: random.Random) -> None:
        """A fault every `every` seconds, for so long; each kind before any comes twice."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            names = [*self.all]
            chance.shuffle(names)
            for name in names:
                await asyncio.sleep(every * chance.uniform(0.5, 1.5))
                if loop.time() > until:
                    return
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    await self.all[name]()
                    self.counts[name] += 1

    # Processes

    def _processes(self, *, workers: bool) -> list[psutil.Process]:
        children = self._server.children(recursive=True)
        return [child for child in children if (child.name() == WORKER) == workers]

    async def _kill_worker(self) -> None:
        for worker in self._processes(workers=True)[:1]:
            worker.kill()

    async def _kill_helper(self) -> None:
        for helper in self._processes(workers=False)[:1]:
            helper.kill()

    async def _stop_worker(self) -> None:
        await _stopped(self._processes(workers=True)[:1])

    async def _stop_helper(self) -> None:
        await _stopped(self._processes(workers=False)[:1])

    async def _hang_up(self) -> None:
        self._server.send_signal(signal.SIGHUP)

    async def _burn(self) -> None:
        command = [sys.executable, "-c", BURN]
        burners = [await asyncio.create_subprocess_exec(*command) for _ in range(CORES)]
        for burner in burners:
            await burner.wait()

    # Disks: a process whose files may not grow gets the errors of a full disk

    async def _full_disk_of_worker(self) -> None:
        for worker in self._processes(workers=True)[:1]:
            with _no_writing(worker):
                await asyncio.sleep(3)

    async def _full_disk_of_server(self) -> None:
        with _no_writing(self._server):
            await asyncio.sleep(3)

    # Requests

    async def _switch_policy(self) -> None:
        await self._post("/admin/policy", {"policy": next(self._policies)})

    async def _swap_lora(self) -> None:
        named = {"lora_name": "passing"}
        await self._post("/v1/load_lora_adapter", {**named, "lora_path": str(self._lora)})
        await self._post("/v1/unload_lora_adapter", named)

    async def _send_long_text(self) -> None:
        messages = [{"role": "user", "content": "word and word " * 300_000}]
        await self._post("/v1/chat/completions", {"model": "builtin", "messages": messages})

    async def _post(self, path: str, body: object) -> None:
        """The answer may be any: a worker may just be starting."""
        with suppress(aiohttp.ClientError):
            async with self._session.post(f"{self._url}{path}", json=body) as response:
                await response.read()


async def _stopped(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.suspend()
    try:
        await asyncio.sleep(2)
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()


@contextmanager
def _no_writing(process: psutil.Process) -> Iterator[None]:
    """Files of the process cannot grow inside the block; Python turns the signal into an error."""
    before = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(resource.RLIMIT_FSIZE, before)
