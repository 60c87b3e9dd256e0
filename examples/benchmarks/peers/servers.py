"""A server as a process: start it, wait for it, measure its memory, stop it."""

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

UP_SECONDS = 900.0  # vLLM compiles
STOP_SECONDS = 20.0
POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Server:
    """How to start a server. `$NAME` in command and environment is a variable of this process."""

    name: str
    group: str  # its table
    command: tuple[str, ...]
    port: int
    model: str  # what requests name
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Up:
    """A server that has answered its first request."""

    process: psutil.Process
    url: str
    model: str
    first_token_seconds: float

    def tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def pss_mib(self) -> int:
        return int(pss_mib(self.process))

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process)


def pss_mib(process: psutil.Process) -> float:
    """The PSS of a server and its workers in MiB: a shared page counts once."""
    return _sum(process, lambda one: one.memory_full_info().pss / (1 << 20))


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds so far of a server and its workers."""
    return _sum(process, lambda one: one.cpu_times().user + one.cpu_times().system)


def _sum(process: psutil.Process, measure: Callable[[psutil.Process], float]) -> float:
    """Of a process and what it started; a compiler may end meanwhile."""
    total = measure(process)
    for one in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += measure(one)
    return total


def read_servers(tables: Mapping[str, Any]) -> list[Server]:
    """The `[[server]]` tables."""
    return [
        Server(
            name=one["name"],
            group=one["group"],
            command=tuple(os.path.expandvars(word) for word in shlex.split(one["command"])),
            port=one["port"],
            model=one["model"],
            environment={
                key: os.path.expandvars(value) for key, value in one.get("environment", {}).items()
            },
        )
        for one in tables["server"]
    ]


@contextmanager
def running(server: Server) -> Iterator[Up]:
    """A started server; raises `SystemExit` if it does not answer in time."""
    began = time.monotonic()
    process = psutil.Popen(
        server.command,
        env={**os.environ, **server.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{server.port}"
    try:
        wait_for_a_token(url, server.model, process)
        yield Up(process, url, server.model, time.monotonic() - began)
    finally:
        if process.poll() is None:
            _stop(process)


def _stop(process: psutil.Popen) -> None:
    everyone = [process, *process.children(recursive=True)]
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(everyone, timeout=STOP_SECONDS)
    for one in left:
        one.kill()
    psutil.wait_procs(left)


def answer(url: str, model: str, prompt: str | list[int], max_tokens: int) -> bytes:
    """The response to a completion request; raises `OSError` if the server does not answer it."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": max_tokens}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=UP_SECONDS) as response:
        content: bytes = response.read()
    return content


def wait_for_a_token(url: str, model: str, process: psutil.Popen | None = None) -> None:
    """Return when the server answers a request; raises `SystemExit` if its process ends before, or
    if that takes too long."""
    until = time.monotonic() + UP_SECONDS
    while time.monotonic() < until:
        if process is not None and process.poll() is not None:
            raise SystemExit(f"{process.args} ended with {process.returncode}")
        try:
            answer(url, model, "hi", 1)
            return
        except OSError:  # not listening, or loading
            time.sleep(POLL_SECONDS)
    raise SystemExit(f"{url} did not come up in {UP_SECONDS:.0f} s")
