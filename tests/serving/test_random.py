import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.commands.bench import command as bench
from gateway.commands.bench.report import read_report
from tests.conftest import read_url, start_server

MODEL = "random:TINY"


async def events(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    async with session.post(url, json={"model": MODEL, "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines]


async def served(url: str) -> None:
    """Its name, tokens in and out, chat."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            assert [one["id"] for one in (await response.json())["data"]] == [MODEL]
        with_stream = {
            "prompt": list(range(20_000, 20_040)),
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        *chunks, last = await events(session, f"{url}/v1/completions", with_stream)
        usage = last["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 12)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text
        assert "\ufffd" not in text
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
        async with session.post(f"{url}/detokenize", json={"tokens": [20_000, 31_999]}) as reply:
            assert (await reply.json())["prompt"] == " w4e20 w7cff"
        chat = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5}
        chunks = await events(session, f"{url}/v1/chat/completions", chat)
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")


async def test_a_random_model_is_served_and_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with start_server(tmp_path, MODEL, "--store", "memory") as child:
        url = read_url(child)
        await served(url)
        figures = tmp_path / "run.json"
        flags = ["-c", "4", "-n", "8", "--prompt-tokens", "16", "--output-tokens", "6"]
        args = bench.parser().parse_args([url, *flags, "--ids", "2048..31999"])
        run = await bench.measure(args)
        run.report.write(figures)
        found = read_report(figures)
        assert (found.num_ok, found.num_failed, found.output_tokens) == (8, 0, 48)
        assert found.setup["model"] == MODEL
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
