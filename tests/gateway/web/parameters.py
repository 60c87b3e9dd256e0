"""What becomes of each parameter of the official clients' newest versions, found by one request.

    python -m tests.gateway.web.parameters > gateway/PARAMETERS.md

A request with the parameter is compared with one without it: the status, the engine's request, the
body, and the header that names ignored fields. A parameter whose effect needs other parameters is
sent with these in both requests.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

from adapters.dialects.choosing import choose_dialect
from engine.speculation.settings import SpeculationSettings
from tests.gateway.rig import MODEL, Rig, Setting, play
from tests.gateway.scripted_model import PlainTemplate

HERMES = choose_dialect("", "hermes", "think")
IGNORED_HEADER = "x-podway-ignored-fields"
TEXT = "Hello! And more."
CONTEXT = 2000
SETTING = Setting(
    texts=(TEXT,),
    dialect=HERMES,
    context=CONTEXT,
    step=0.01,
    speculation=SpeculationSettings("prediction", 8),
)
Json = dict[str, Any]

HONOURED = "honoured"
ECHOED = "echoed"  # the response repeats it, and nothing else
REJECTED = "rejected"
NAMED = "ignored, and named in the header"
IGNORED = "ignored"
ABOUT = {
    HONOURED: "the engine's request or the response is another one",
    ECHOED: "the response repeats it; nothing else depends on it",
    REJECTED: "a 400 that names it",
    NAMED: f"`{IGNORED_HEADER}` has its name",
    IGNORED: "nothing changes: a hint to OpenAI's or Anthropic's own service",
}


class TellingTemplate(PlainTemplate):
    """Shows the variables that it gets before the messages."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        shown = sorted(f"{name}={value}" for name, value in kwargs.items() if name != "tools")
        return "".join(shown) + super().render(messages, **kwargs)


class Probe(NamedTuple):
    """A value with an effect, and what else both requests need."""

    value: Any
    others: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Api:
    """An endpoint, a body that it serves, and a probe for each parameter of its client."""

    title: str
    path: str
    body: Mapping[str, Any]
    probes: Mapping[str, Probe]


F = {"name": "f", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": F}]
RESPONSE_TOOLS = [{"type": "function", **F}]
CLAUDE_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
CLAUDE_SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
TOO_LONG = [{"role": "user", "content": "x" * CONTEXT}, {"role": "user", "content": "hi"}]
MESSAGES = [{"role": "user", "content": "hi"}]
CACHE = {"prompt_cache_key": Probe("k"), "prompt_cache_retention": Probe("24h"),
         "prompt_cache_options": Probe({"mode": "explicit"}),
         "prompt_cache_options.ttl": Probe({"ttl": "30m"})}  # fmt: skip
SHARED = {
    "temperature": Probe(0.5), "top_p": Probe(0.5), "user": Probe("u"),
    "service_tier": Probe("flex"), "metadata": Probe({"a": "b"}), "store": Probe(False),
    "safety_identifier": Probe("s"), "moderation": Probe({"model": "m"}), **CACHE,
}  # fmt: skip
COMPLETION = {
    "frequency_penalty": Probe(1), "presence_penalty": Probe(1), "logit_bias": Probe({"65": 5}),
    "max_tokens": Probe(3), "n": Probe(2), "stop": Probe("l"), "seed": Probe(2),
    "temperature": Probe(0.5), "top_p": Probe(0.5), "user": Probe("u"),
    "stream_options": Probe({"include_usage": True}, {"stream": True}),
}  # fmt: skip
APIS = (
    Api("Chat completions", "/v1/chat/completions", {"messages": MESSAGES, "seed": 1}, {
        **SHARED, **COMPLETION, "audio": Probe({"voice": "alloy", "format": "wav"}),
        "functions": Probe([F]), "function_call": Probe({"name": "f"}, {"functions": [F]}),
        "logprobs": Probe(True), "top_logprobs": Probe(1, {"logprobs": True}),
        "max_completion_tokens": Probe(3), "modalities": Probe(["audio"]), "tools": Probe(TOOLS),
        "parallel_tool_calls": Probe(False, {"tools": TOOLS, "tool_choice": "required"}),
        "prediction": Probe({"type": "content", "content": "x"}), "reasoning_effort": Probe("none"),
        "response_format": Probe({"type": "json_object"}), "verbosity": Probe("high"),
        "tool_choice": Probe("required", {"tools": TOOLS}), "web_search_options": Probe({}),
    }),
    Api("Completions", "/v1/completions", {"prompt": "ab", "seed": 1}, {
        **COMPLETION, "best_of": Probe(2), "echo": Probe(True), "logprobs": Probe(1),
        "suffix": Probe("x"),
    }),
    Api("Responses", "/v1/responses", {"input": "hi", "seed": 1}, {
        **SHARED, "access_programs": Probe({"cyber": "standard"}), "background": Probe(True),
        "background_options": Probe({"completion_window": "2h"}), "conversation": Probe("c"),
        "context_management": Probe([{"type": "compaction"}]), "prompt": Probe({"id": "p"}),
        "image": Probe({"context_compression": "auto"}), "max_tool_calls": Probe(1),
        "include": Probe(["message.output_text.logprobs"]), "instructions": Probe("Be brief."),
        "max_output_tokens": Probe(3), "tools": Probe(RESPONSE_TOOLS),
        "parallel_tool_calls": Probe(False, {"tools": RESPONSE_TOOLS, "tool_choice": "required"}),
        "previous_response_id": Probe("resp_none"), "reasoning": Probe({"effort": "none"}),
        "stream_options": Probe({"include_obfuscation": True}, {"stream": True}),
        "text": Probe({"format": SCHEMA}),
        "tool_choice": Probe("required", {"tools": RESPONSE_TOOLS}),
        "top_logprobs": Probe(1), "truncation": Probe("auto", {"input": TOO_LONG}),
    }),
    Api("Messages", "/v1/messages", {"messages": MESSAGES, "max_tokens": 20}, {
        "cache_control": Probe({"type": "ephemeral"}), "container": Probe("c"),
        "diagnostics": Probe({}), "inference_geo": Probe("us"), "metadata": Probe({"user_id": "u"}),
        "output_config": Probe({"format": CLAUDE_SCHEMA}), "service_tier": Probe("standard_only"),
        "speed": Probe("fast"), "stop_sequences": Probe(["l"]), "system": Probe("Be brief."),
        "thinking": Probe({"type": "enabled", "budget_tokens": 1024}, {"max_tokens": 1500}),
        "tool_choice": Probe({"type": "any"}, {"tools": CLAUDE_TOOLS}),
        "tools": Probe(CLAUDE_TOOLS),
        "user_profile_id": Probe("u"), "workspace_id": Probe("w"),
    }),
)  # fmt: skip
CACHED = ("cached_tokens", "cache_write_tokens", "cache_read_input_tokens")
FRESH = (
    *("id", "created", "created_at", "completed_at", "call_id"),
    *(*CACHED, "cache_creation_input_tokens", "cache_creation"),
)


class Answer(NamedTuple):
    """What is compared."""

    status: int
    body: Any
    ignored: str
    spec: Json


async def answer(rig: Rig, path: str, body: Mapping[str, Any]) -> Answer:
    """The answer to a request, without what differs between any two."""
    num_ended = len(rig.ended)
    exchange = await rig.client.post(path, {"model": MODEL, **body})
    is_stream = body.get("stream") and exchange.status == 200
    result: Any = exchange.events if is_stream else exchange.json
    await asyncio.sleep(1)  # until its engine requests have ended
    specs = [
        asdict(replace(each.spec, label="", sampling=replace(each.spec.sampling, seed=0)))
        for each in rig.ended[num_ended:]
    ]
    more: Json = {"seed": body.get("seed")}
    if path == "/v1/responses" and exchange.status == 200 and not body.get("stream"):
        async with rig.client.get(f"{path}/{result['id']}") as stored:
            more["stored"] = await stored.start()
            await stored.read()
    ignored = exchange.headers.get(IGNORED_HEADER, "")
    return Answer(exchange.status, without(result, FRESH), ignored, {"specs": specs, **more})


def without(value: Any, names: tuple[str, ...]) -> Any:
    """A JSON value without the fields of these names, at any depth."""
    if isinstance(value, dict):
        return {name: without(each, names) for name, each in value.items() if name not in names}
    return [without(each, names) for each in value] if isinstance(value, list) else value


async def verdict(rig: Rig, api: Api, name: str) -> str:
    """What becomes of a parameter."""
    probe = api.probes[name]
    body = {**api.body, **probe.others}
    plain = await answer(rig, api.path, body)
    assert plain.status == 200 or name == "truncation", plain
    field = name.partition(".")[0]
    found = await answer(rig, api.path, {**body, field: probe.value})
    if found.status != 200:
        error = found.body["error"]
        assert found.status in (400, 404), found
        assert name in (error.get("param") or error["message"]), found
        return HONOURED if name in ("previous_response_id", "conversation") else REJECTED
    if name in found.ignored:
        return NAMED
    if found.spec != plain.spec or without(found.body, (name,)) != without(plain.body, (name,)):
        return HONOURED
    return ECHOED if found.body != plain.body else IGNORED


def verdicts(api: Api) -> dict[str, str]:
    """What becomes of each parameter of an endpoint."""
    found: dict[str, str] = {}

    async def scene(rig: Rig) -> None:
        for name in sorted(api.probes):
            found[name] = await verdict(rig, api, name)

    with patch("tests.gateway.rig.PlainTemplate", TellingTemplate):
        play(scene, SETTING)
    return found


def page() -> str:
    """The page, as Markdown."""
    lines = [
        "# What becomes of each parameter",
        "",
        "Written by `python -m tests.gateway.web.parameters` and checked by a test. Each parameter",
        "of the Python clients openai 3.57 and anthropic 2.14 was sent once, and the answer was",
        "compared with that to the same request without it. What is needed anyway (`model`,",
        "`messages`, `input`, `prompt`) is left out. The chat template of the test shows all",
        "variables that it gets: what is honoured there has the effect that a model's own template",
        "gives it.",
        "",
        *(f"- *{name}*: {about}." for name, about in ABOUT.items()),
    ]
    for api in APIS:
        lines += ["", f"## {api.title}", "", "| parameter | is |", "|---|---|"]
        lines += [f"| `{name}` | {how} |" for name, how in verdicts(api).items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
