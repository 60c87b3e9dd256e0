import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.conftest import Server, read_url, start_server
from tests.serving.client import Json, with_stream

LONG: Json = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "temperature": 0}
FLAGS = ("--pipeline-stages", "2")


@dataclass(frozen=True)
class Resources:
    """Processes, files and ports of a server and its workers which must be gone afterwards."""

    processes: list[psutil.Process]
    files: set[str]  # in shared memory, and names of sockets
    ports: set[int]

    def check_gone(self) -> None:
        _, alive = psutil.wait_procs(self.processes, timeout=30)
        assert not alive
        assert not {name for name in self.files if os.path.exists(name)}
        assert not listening(psutil.net_connections("tcp")) & self.ports


def listening(connections: Sequence[Any]) -> set[int]:
    """The ports that accept connections."""
    return {found.laddr.port for found in connections if found.status == "LISTEN"}


def resources_of(server: Server) -> Resources:
    parent = psutil.Process(server.pid)
    processes = [parent, *parent.children(recursive=True)]
    assert len(processes) == 3
    files: set[str] = set()
    ports: set[int] = set()
    for process in processes:
        opened = Path(f"/proc/{process.pid}/fd")
        files |= {os.readlink(link) for link in opened.iterdir() if link.is_symlink()}
        files |= {mapping.path for mapping in process.memory_maps()}
        files |= {str(c.laddr) for c in process.net_connections("unix") if c.laddr}
        ports |= listening(process.net_connections("tcp"))
    assert ports
    is_ours = ("/dev/shm/", "/run/shm/", "/tmp/podway", "/tmp/torch")
    return Resources(processes, {name for name in files if name.startswith(is_ours)}, ports)


@asynccontextmanager
async def streaming(url: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """A streamed response whose first line has arrived."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=with_stream(LONG, stream=True)) as response,
    ):
        assert (await response.content.readline()) == b"id: 0\n"
        yield response


async def exit_code(server: Server) -> int:
    return await asyncio.to_thread(server.wait, 60)


@pytest.fixture(name="server")
def _server(tmp_path: Path) -> Any:
    with start_server(tmp_path, *FLAGS) as server:
        yield server


async def test_sigterm_lets_running_requests_finish(server: Server) -> None:
    async with streaming(read_url(server)) as response:
        owned = resources_of(server)
        server.send_signal(signal.SIGTERM)
        assert (await response.content.read()).strip().endswith(b"data: [DONE]")
    assert await exit_code(server) == 0
    owned.check_gone()


async def test_sigint_ends_running_requests_with_an_error(server: Server) -> None:
    async with streaming(read_url(server)) as response:
        owned = resources_of(server)
        server.send_signal(signal.SIGINT)
        rest = await response.content.read()
        assert b'"code":"unavailable"' in rest
    assert await exit_code(server) == 130
    owned.check_gone()


async def test_a_second_sigint_does_not_wait_for_a_worker_that_hangs(server: Server) -> None:
    async with streaming(read_url(server)) as response:
        owned = resources_of(server)
        owned.processes[1].suspend()
        server.send_signal(signal.SIGINT)
        await response.content.read()
        server.send_signal(signal.SIGINT)
        assert await exit_code(server) == 130
    last_line = server.log.read_text().splitlines()[-1]
    assert last_line.endswith("second SIGINT: the process ends without waiting")
    owned.check_gone()


async def test_workers_do_not_outlive_a_server_that_is_killed(server: Server) -> None:
    async with streaming(read_url(server)) as response:
        owned = resources_of(server)
        server.send_signal(signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await response.content.read()
    assert await exit_code(server) == -signal.SIGKILL
    owned.check_gone()
