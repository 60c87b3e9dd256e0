"""`POST /admin/simulate?policy=NAME`: plays a recording under another policy, in virtual time.

The body is a file that `podway serve --record` wrote. The answer is the events of the simulated run
as JSON lines. The simulation runs in a process of its own with low priority, one at a time.
"""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

from engine.errors import InvalidRequest, Overloaded
from engine.policy import POLICIES
from gateway.access.callers import read_body
from gateway.schema.decoding import check_allowed
from gateway.service import service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

MAX_SECONDS = 60.0
NICE = 10


async def simulate(http: "HttpRequest") -> Response:
    """The events of the simulated run.

    Raises `InvalidRequest` for an unknown policy, for a body that is no recording and for a
    recording that cannot be simulated within `MAX_SECONDS`, and `Overloaded` while another
    simulation runs.
    """
    service = service_of(http)
    policy = http.query_params.get("policy", "fcfs")
    check_allowed(policy, "policy", tuple(POLICIES))
    recording = await read_body(http, service.limits, media_type=None)
    if not recording.startswith(b"{"):
        message = "The body must be a recording, a file that `podway serve --record` wrote."
        raise InvalidRequest(message, "recording")
    slot: asyncio.Semaphore = http.app.state.simulations
    if slot.locked():
        raise Overloaded("Another simulation is running.", retry_after=MAX_SECONDS)
    async with slot:
        events = await _events(recording, policy)
    return Response(events, media_type="application/jsonl")


async def _events(recording: bytes, policy: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "recording.jsonl"), Path(folder, "events.jsonl")
        await asyncio.to_thread(source.write_bytes, recording)
        flags = ["--replay", str(source), "--policy", policy, "--events", str(target)]
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", str(NICE), sys.executable, "-P", "-m", "gateway", "simulate", *flags),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )
        try:
            async with asyncio.timeout(MAX_SECONDS):
                _, errors = await process.communicate()
        except TimeoutError:
            raise InvalidRequest(
                f"the recording takes longer than {MAX_SECONDS:.0f} s to simulate; "
                "`podway simulate --replay` has no such limit",
                "recording",
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or ["it failed"]
            raise InvalidRequest(f"the recording cannot be simulated: {lines[-1]}", "recording")
        return await asyncio.to_thread(target.read_bytes)
