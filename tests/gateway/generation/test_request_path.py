"""How many modules a streamed chat request runs between its body and its first token."""

import sys
from pathlib import Path
from types import FrameType

import pytest

import gateway
from gateway.access.callers import read_body
from tests.gateway.rig import CHAT, Rig, chat, play

ROOT = Path(gateway.__file__).parents[1]
PACKAGES = ("gateway", "engine")
HARNESS = "engine/simulated/"  # instead of a worker process and the clock
MAX_MODULES = 60


def test_a_streamed_chat_runs_few_modules_before_its_first_token() -> None:
    modules: set[str] = set()

    def record_call(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            modules.add(path.relative_to(ROOT).as_posix())

    async def read_then_record(*args: object) -> bytes:
        body = await read_body(*args)  # type: ignore[arg-type]
        sys.setprofile(record_call)
        return body

    async def scene(rig: Rig) -> None:
        async with rig.client.post(CHAT, chat(stream=True)) as exchange:
            async for event in exchange.events():
                if event != "DONE" and event["choices"][0]["delta"].get("content"):
                    sys.setprofile(None)

    before = sys.getprofile()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gateway.web.route.read_body", read_then_record)
            play(scene)
    finally:
        sys.setprofile(before)
    counted = {
        path for path in modules if path.startswith(PACKAGES) and not path.startswith(HARNESS)
    }
    assert "gateway/web/routes/chat.py" in counted
    assert "engine/loop.py" in counted
    assert len(counted) <= MAX_MODULES, "\n".join(sorted(counted))
