"""Chat templates that come with a request are rendered in a process that can be killed.

The limits in `bounds.py` count steps and characters, but a call of a built-in function is one step
however long it takes. So the process has limits of its own: CPU time and memory (`setrlimit`, see
`render_process.py`) and, here, wall time.
"""

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import InvalidRequest

MAX_PROCESSES = 2
WALL_SECONDS = 5.0  # with the start of the process, about 0.3 s
CPU_SECONDS = 3
MEMORY_BYTES = 1 << 30
_MODULE = "adapters.dialects.render_process"
_FIELD = "chat_template"


class TemplateJob(NamedTuple):
    """One rendering. All values are JSON."""

    source: str
    special_tokens: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    add_generation_prompt: bool


class TemplateProcesses:
    """Renders one job per process, at most `MAX_PROCESSES` at the same time."""

    def __init__(self, wall_seconds: float = WALL_SECONDS) -> None:
        self._seats = asyncio.Semaphore(MAX_PROCESSES)
        self._wall_seconds = wall_seconds

    async def render(self, job: TemplateJob) -> str:
        """The prompt. Raises `InvalidRequest` for an error of the template or an exceeded limit."""
        encoded = await asyncio.to_thread(lambda: json.dumps(job._asdict()).encode())
        async with self._seats:
            output = await self._run(encoded)
        result = await asyncio.to_thread(json.loads, output)
        if "error" in result:
            raise InvalidRequest(result["error"], result["param"])
        text: str = result["text"]
        return text

    async def _run(self, encoded: bytes) -> bytes:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", _MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(self._wall_seconds):
                output, _ = await process.communicate(encoded)
        except TimeoutError:
            raise _over_limit(f"{self._wall_seconds:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise _over_limit(f"{CPU_SECONDS} s of CPU time or {MEMORY_BYTES >> 20} MiB")
        return output


def _over_limit(limit: str) -> InvalidRequest:
    return InvalidRequest(f"'{_FIELD}' takes more than the limit of {limit} to render.", _FIELD)
