"""The walk of a chat body to its first token in the server's process, all live observers included.

A *form* is a type that holds the request whole; a *stop* is a module on the way to where a form is
made: on the call stack at that moment. (Responses and Messages have one form more: their own struct
becomes a `ChatRequest`.) The bounds are what was found; raise one only with a reason.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import pytest

import gateway
from engine.request import Request, RequestSpec
from engine.step import StepEntry
from gateway.access.bodies import read_body
from gateway.generation.plan import GenerationPlan
from gateway.schema.openai.chat import ChatRequest
from tests.gateway.rig import CHAT, Rig, chat, play

ROOT = Path(gateway.__file__).parents[1]
PACKAGES = ("gateway", "engine")
HARNESS = "engine/simulated/"  # instead of a worker process and the clock
FORMS = (ChatRequest, GenerationPlan, RequestSpec, Request, StepEntry)
FIRST_STOP = "gateway/web/route.py"  # what called it ran before the body was there
MAX_MODULES = 50
MAX_STOPS = 11
MAX_FORMS = 5


@dataclass(slots=True)
class Walk:
    """What ran between the body and the first token."""

    modules: set[str] = field(default_factory=set)
    stops: list[str] = field(default_factory=list)  # in order
    forms: set[type] = field(default_factory=set)

    def record(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if (module := module_of(frame.f_code)) is not None:
            self.modules.add(module)
        for form in FORMS:
            if form not in self.forms and makes_or_holds(frame, form):
                self.forms.add(form)
                self._stop_at(frame)

    def _stop_at(self, frame: FrameType | None) -> None:
        stack: dict[str, None] = {}
        while frame is not None and FIRST_STOP not in stack:
            if (module := module_of(frame.f_code)) is not None:
                stack[module] = None
            frame = frame.f_back
        self.stops += [module for module in reversed(stack) if module not in self.stops]


def module_of(code: CodeType) -> str | None:
    """The file of a function of ours, from the repository's root."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return name if name.startswith(PACKAGES) and not name.startswith(HARNESS) else None


def makes_or_holds(frame: FrameType, form: type) -> bool:
    """Whether an object of this type is an argument, be it of its own constructor."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = [frame.f_locals.get(name) for name in names]
    return any(isinstance(value, form) or value is form for value in values)


def test_the_walk_of_a_streamed_chat_to_its_first_token_is_short() -> None:
    walk = Walk()

    async def read_then_record(*args: object) -> bytes:
        body = await read_body(*args)  # type: ignore[arg-type]
        sys.setprofile(walk.record)
        return body

    async def scene(rig: Rig) -> None:
        async with rig.client.get("/health"):
            pass  # the engine runs from now on, as in a server that has started
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
    assert {"gateway/web/routes/chat.py", "engine/loop.py"} <= walk.modules
    assert "gateway/observe/metrics.py" in walk.modules
    assert walk.forms == set(FORMS)
    assert len(walk.forms) <= MAX_FORMS
    assert len(walk.stops) <= MAX_STOPS, "\n".join(walk.stops)
    assert len(walk.modules) <= MAX_MODULES, "\n".join(sorted(walk.modules))
