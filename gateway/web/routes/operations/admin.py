"""What admin keys may do. `/admin/policy`: GET returns the scheduling policy and its settings, POST
changes them while serving. `/v1/load_lora_adapter`, `/v1/unload_lora_adapter`: vLLM's bodies.

`POST /admin/simulate?policy=NAME` plays a recording under another policy, in virtual time. The body
is a file that `podway serve --record` wrote. The answer is the events of the simulated run as JSON
lines. The simulation runs in a process of its own with low priority, one at a time.
"""

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from engine.errors import InvalidRequest, Overloaded
from engine.policy import POLICIES, PolicySettings, build, name_of, settings_of
from gateway.access.bodies import read_body
from gateway.options import options_of, with_values
from gateway.schema.decoding import check_allowed, decode
from gateway.service import Service, service_of
from gateway.web.route import decoded_body

MAX_SECONDS = 60.0
NICE = 10
logger = logging.getLogger(__name__)
OPTIONS = {option.name: option for option in options_of("policies", PolicySettings())}


async def simulate(http: HttpRequest) -> Response:
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


class LoadLoraRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a load: a directory of PEFT files on the workers' machines. With `load_inplace`
    it replaces the adapter of this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    base_model_name: str | None = None  # ignored, as in vLLM


class UnloadLoraRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an unload. `lora_int_id` is ignored: the name identifies the adapter."""

    lora_name: str
    lora_int_id: int | None = None


async def load_lora(http: HttpRequest) -> Response:
    """Load an adapter; its name is a model name when this returns. Raises `InvalidRequest`."""
    service = service_of(http)
    request = await decoded_body(http, partial(decode, LoadLoraRequest))
    if not request.lora_path:
        raise InvalidRequest("'lora_path' is empty.", "lora_path")
    now = service.unix_now()
    await service.loras.load(
        request.lora_name, request.lora_path, now, replaces=request.load_inplace
    )
    return _success(f"LoRA adapter '{request.lora_name}' added successfully.")


async def unload_lora(http: HttpRequest) -> Response:
    """Unload an adapter: its name is unknown at once; this returns when its last request has ended
    and its memory is free. Raises `LoraNotFound`."""
    service = service_of(http)
    request = await decoded_body(http, partial(decode, UnloadLoraRequest))
    await service.loras.unload(request.lora_name)
    return _success(f"LoRA adapter '{request.lora_name}' removed successfully.")


def _success(message: str) -> Response:
    return PlainTextResponse(f"Success: {message}")


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a POST: a name of `engine.policy.POLICIES`, and settings to change.

    They are named as in the settings file; one that is absent or null keeps its value.
    """

    policy: str


PolicyChoice = msgspec.defstruct(
    "PolicyChoice",
    [(name, option.kind | None, None) for name, option in OPTIONS.items()],
    bases=(_Named,),
    namespace={"__doc__": _Named.__doc__},
    forbid_unknown_fields=True,
)


def changes_of(choice: _Named) -> dict[str, object]:
    """The settings to change, by the fields of `PolicySettings`. Raises `InvalidRequest`."""
    changes: dict[str, object] = {}
    for name, option in OPTIONS.items():
        if (value := getattr(choice, name)) is not None:
            try:
                changes[option.field] = option.parse(value)
            except ValueError as error:
                raise InvalidRequest(
                    f"'{name}'{str(error).removeprefix(option.flag)}", name
                ) from None
    return changes


async def policy(http: HttpRequest) -> dict[str, Any]:
    """The current policy with its settings, the admission mode and the policies to choose from.

    Raises `InvalidRequest` for a POST with an unknown policy or a setting that is out of range.
    """
    service = service_of(http)
    if http.method == "POST":
        choice = await decoded_body(http, partial(decode, cast("type[_Named]", PolicyChoice)))
        check_allowed(choice.policy, "policy", tuple(POLICIES))
        _switch(service, choice.policy, changes_of(choice))
    scheduler = service.engine.scheduler
    settings = settings_of(scheduler.policy)
    return {
        "policy": name_of(scheduler.policy),
        "admission": scheduler.settings.admission.value,
        "policies": list(POLICIES),
        "itl_goal": _finite(scheduler.settings.itl_goal),
        "settings": {name: getattr(settings, option.field) for name, option in OPTIONS.items()},
    }


def _finite(seconds: float) -> float | None:
    return None if seconds == inf else seconds


def _switch(service: Service, name: str, changes: Mapping[str, object]) -> None:
    """Live requests move to the new policy; without a difference nothing changes."""
    scheduler = service.engine.scheduler
    before = name_of(scheduler.policy)
    settings = with_values(settings_of(scheduler.policy), changes)
    if name == before and settings == settings_of(scheduler.policy):
        return
    engines = service.engine.engines
    for engine in engines:
        engine.switch(build(name, engine.scheduler.cost, settings))
    live = sum(len(engine.scheduler.pool) for engine in engines)
    logger.info("policy=%s before=%s live=%d", name, before, live)
