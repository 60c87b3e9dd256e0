import asyncio
import json
import signal
from pathlib import Path

import aiohttp
import psutil

from tests.conftest import read_url, start_server
from tests.serving.client import Json, streamed_text

COLOUR: Json = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "code": {"type": "string"}},
    "required": ["colour", "code"],
    "additionalProperties": False,
}
PROMPTS: list[Json] = [
    {"prompt": "Hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True},
    {"prompt": "What is 2 + 3?", "max_tokens": 25, "temperature": 0.8, "seed": 7},
    {"prompt": "Tell me a story about a fox", "max_tokens": 60, "temperature": 0},
    {"prompt": "A colour", "max_tokens": 50, "temperature": 1.0, "seed": 2, "guided_json": COLOUR},
    {"prompt": "one two three " * 20, "max_tokens": 30, "temperature": 1.0, "seed": 1},
    {"prompt": "Hello", "max_tokens": 40, "temperature": 0, "stop": ["the", "is "]},
    {"prompt": "A king", "max_tokens": 40, "temperature": 0.8, "seed": 5, "min_tokens": 30},
    {"prompt": "A fox", "max_tokens": 40, "temperature": 0, "presence_penalty": 1.1},
]


async def texts_of(session: aiohttp.ClientSession, url: str) -> list[str]:
    return await asyncio.gather(*(streamed_text(session, url, one) for one in PROMPTS))


FLAGS = ["--pipeline-stages=2", "--tensor-ranks=2", "--lookahead=1"]


async def test_two_stages_of_two_ranks_give_the_texts_of_one_worker(
    server_url: str, tmp_path: Path
) -> None:
    with start_server(tmp_path, *FLAGS, "--trace=trace.json") as server:
        url = read_url(server)
        async with aiohttp.ClientSession() as session:
            expected = await texts_of(session, server_url)
            assert await texts_of(session, url) == expected
            workers = workers_of(server.pid)
        assert len(workers) == 4
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert not any(worker.is_running() for worker in workers)
    check_control_came_first(json.loads((tmp_path / "trace.json").read_text()))


def workers_of(pid: int) -> list[psutil.Process]:
    """The server's workers; the process that compiles grammars is none."""
    children = psutil.Process(pid).children()
    return [each for each in children if "engine.worker.process.entry" in each.cmdline()]


def check_control_came_first(events: list[Json]) -> None:
    """The last stage knew of steps before the first had computed what it handed on."""
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert sorted(names.values()) == [
        "loop",
        *(f"stage {s} rank {r}" for s in (0, 1) for r in (0, 1)),
    ]
    computed = {
        (names[each["pid"]], each["args"]["step"]): each for each in events if each["ph"] == "X"
    }
    steps = {step for name, step in computed if name == "stage 1 rank 0"}
    ahead = [
        step
        for step in steps
        if computed["stage 1 rank 0", step]["args"]["learned_at"]
        < computed["stage 0 rank 0", step]["ts"] + computed["stage 0 rank 0", step]["dur"]
    ]
    assert len(steps) > 50
    assert len(ahead) > len(steps) / 2  # other processes delay the rest
    for step in steps:
        own = computed["stage 1 rank 0", step]
        assert own["args"]["learned_at"] <= own["args"]["data_at"] <= own["ts"]
