import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.conftest import Server, read_url, start_server
from tests.gateway.forms import ENDED, chat_lines
from tests.gateway.rig import CHAT
from tests.serving.client import pause
from tests.serving.prefixes.test_disk_tier import STORY as PROMPT
from tests.serving.prefixes.test_disk_tier import cached, chat, text, until_saved

FLAGS = ("--store", "kept.sqlite")
FIXED = {"temperature": 0.9, "seed": 7, "ignore_eos": True}
STORY = {"prompt": "Once", "max_tokens": 240, "stream": True, "model": "builtin", **FIXED}
HELD = {"input": "A story.", "max_output_tokens": 240, "background": True, "stream": True}


async def upgrade(server: Server, *flags: str) -> tuple[int, str]:
    """The exit code of `podway upgrade`, and what it has printed."""
    command = [sys.executable, "-m", "gateway", "upgrade", "--pid", str(server.pid), *flags]
    run = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr


async def completion(session: aiohttp.ClientSession, url: str) -> str:
    """The text of the story, which is streamed."""
    text = ""
    async with session.post(f"{url}/v1/completions", json=STORY) as response:
        assert response.status == 200
        async for line in response.content:
            if b'"text":"' in line:
                text += line.decode().split('"text":"')[1].split('","')[0]
        assert line == b"\n"
    return text


async def test_streams_go_on_and_held_ones_are_read_through_the_new_server(
    tmp_path: Path,
) -> None:
    with start_server(tmp_path, *FLAGS) as server:
        url = await asyncio.to_thread(read_url, server)
        (worker,) = psutil.Process(server.pid).children()
        async with aiohttp.ClientSession() as session:
            expected = await completion(session, url)
            running = asyncio.create_task(completion(session, url))
            held = await session.post(
                f"{url}/v1/responses", json={**HELD, "model": "builtin", **FIXED}
            )
            first = (await held.content.readuntil(b"\n\n")).split(b'"id":"')[1]
            response_id = first.split(b'"')[0].decode()
            await until_live(session, url, 2)
            worker.suspend()
            assert await upgrade(server) == (0, taken(server))
            worker.resume()
            place = f"{url}/v1/responses/{response_id}"
            async with aiohttp.ClientSession() as fresh:  # its connection is to the new server
                async with fresh.get(f"{place}?stream=true") as again:
                    assert again.status == 200
                    events = await again.read()
                async with fresh.get(place) as response:
                    assert (await response.json())["id"] == response_id
            assert events.endswith(await held.content.read())
            assert await running == expected
            held.close()
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 60) == 0


async def test_the_old_servers_worker_may_die_beside_a_new_one_with_the_same_disk_tier(
    tmp_path: Path,
) -> None:
    kept = ("--disk-kv", "kv", "--kv-slots", "4096")
    body = {**STORY, "stream": False, "max_tokens": 100}
    headers = {"idempotency-key": "one"}
    with start_server(tmp_path, *FLAGS, *kept) as server:
        url = await asyncio.to_thread(read_url, server)
        (worker,) = psutil.Process(server.pid).children()
        first = await asyncio.to_thread(chat, url, PROMPT)
        await asyncio.to_thread(until_saved, url)
        async with aiohttp.ClientSession() as old, aiohttp.ClientSession() as new:
            expected = await completion(old, url)
            async with old.post(f"{url}/v1/completions", json=body) as reply:
                whole = (await reply.json())["choices"]
            worker.suspend()
            running = [asyncio.create_task(completion(old, url)) for _ in range(4)]
            earlier = asyncio.create_task(
                old.post(f"{url}/v1/completions", json=body, headers=headers)
            )
            await until_live(old, url, 5)
            assert await upgrade(server) == (0, taken(server))
            worker.kill()  # the new server's worker gets its lock of the files
            async with new.post(f"{url}/v1/completions", json=body, headers=headers) as retried:
                assert (await retried.json())["choices"] == whole
            assert (await earlier).status == 409
            again = await asyncio.to_thread(chat, url, PROMPT)
            assert cached(again) > 0.9 * first["usage"]["prompt_tokens"]
            assert text(again) == text(first)
            assert await asyncio.gather(*running) == [expected] * 4
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 60) == 0
    with start_server(tmp_path, *FLAGS, *kept) as server:  # nobody keeps it from the files
        url = await asyncio.to_thread(read_url, server)
        again = await asyncio.to_thread(chat, url, PROMPT)
        assert cached(again) > 0.9 * first["usage"]["prompt_tokens"]
        assert text(again) == text(first)


async def until_live(session: aiohttp.ClientSession, url: str, count: int) -> None:
    """Wait until so many requests are live."""
    live = -1
    while live != count:
        async with session.get(f"{url}/v1/loads") as response:
            (load,) = (await response.json())["loads"]
        live = load["num_running_reqs"] + load["num_waiting_reqs"]


MODELS = """\
[models.builtin]
model = "builtin"
pinned = true
[models.used]
model = "builtin"
[models.unused]
model = "builtin"
disk_kv = "kv"
"""


async def test_the_new_server_loads_what_was_loaded_and_the_old_one_a_model_whose_disk_tier_it_has(
    tmp_path: Path,
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(MODELS)
    kept = ("--config", str(file), "--threads", "1", "--kv-slots", "4096", "--body-seconds", "600")
    asked = {"model": "unused", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    body = json.dumps(asked)
    with start_server(tmp_path, *FLAGS, *kept) as server:
        url = await asyncio.to_thread(read_url, server)
        completions = f"{url}/v1/completions"
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        writer.write(f"{head}\r\n\r\n{body[:-1]}".encode())
        used = {**asked, "model": "used"}
        async with aiohttp.ClientSession() as old, old.post(completions, json=used) as reply:
            assert reply.status == 200  # the other request is in the old server, too
        assert await upgrade(server) == (0, taken(server))
        async with aiohttp.ClientSession() as new:
            async with new.get(f"{url}/v1/models") as reply:
                models = (await reply.json())["data"]
            status = {each["id"]: each["status"]["value"] for each in models}
            assert status == {"builtin": "loaded", "used": "loaded", "unused": "unloaded"}
            async with new.post(completions, json=asked) as reply:
                expected = (await reply.json())["choices"]
        writer.write(body[-1:].encode())
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        answer = await reader.read()
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"] == expected
        writer.close()
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 60) == 0


async def test_both_servers_use_the_store_and_a_batch_goes_on_in_the_new_one(
    tmp_path: Path,
) -> None:
    kept = ("--record", "run.jsonl", "--trace", "run.json")
    with start_server(tmp_path, *FLAGS, *kept, "--max-batch-size", "2") as server:
        url = await asyncio.to_thread(read_url, server)
        (worker,) = psutil.Process(server.pid).children()
        async with aiohttp.ClientSession() as old:
            worker.suspend()
            batch = await begun_batch(old, url)
        assert await upgrade(server) == (0, taken(server))
        async with aiohttp.ClientSession() as new:
            one = {"model": "builtin", "input": "One.", "max_output_tokens": 8}
            async with new.post(f"{url}/v1/responses", json=one) as created:
                response = await created.json()
            with suppress(psutil.NoSuchProcess):  # the former server may have ended: it had no more
                worker.resume()
            async with new.get(f"{url}/v1/responses/{response['id']}") as found:
                assert (await found.json())["output"] == response["output"]
            while batch["status"] not in ENDED:
                await pause()
                async with new.get(f"{url}/v1/batches/{batch['id']}") as reply:
                    batch = await reply.json()
            assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
            async with new.get(f"{url}/v1/files/{batch['output_file_id']}/content") as content:
                lines = [json.loads(line) for line in (await content.text()).splitlines()]
        assert sorted(line["custom_id"] for line in lines) == [f"line-{n}" for n in range(6)]
        own = successor(server)
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 60) == 0
    for name in ("run", f"run.{own}"):
        assert '"arrived"' in (tmp_path / f"{name}.jsonl").read_text()
        assert json.loads((tmp_path / f"{name}.json").read_text())


async def begun_batch(session: aiohttp.ClientSession, url: str) -> Any:
    """A batch of six lines, which is in progress."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", chat_lines(6, model="builtin", max_tokens=8), filename="in.jsonl")
    async with session.post(f"{url}/v1/files", data=form) as uploaded:
        file_id = (await uploaded.json())["id"]
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    async with session.post(f"{url}/v1/batches", json=body) as created:
        batch = await created.json()
    while batch["status"] != "in_progress":
        await pause()
        async with session.get(f"{url}/v1/batches/{batch['id']}") as reply:
            batch = await reply.json()
    return batch


async def test_systemd_is_told_which_process_is_the_main_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"podway-test/{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(60)
        systemd.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        with start_server(tmp_path, *FLAGS, "--drain-seconds", "300") as server:
            url = await asyncio.to_thread(read_url, server)
            assert systemd.recv(100) == b"READY=1"
            (worker,) = psutil.Process(server.pid).children()
            async with aiohttp.ClientSession() as session:
                expected = await completion(session, url)
                worker.suspend()
                running = asyncio.create_task(completion(session, url))
                await until_live(session, url, 1)
                code, output = await upgrade(server)
                assert code == 0
                new = int(output.split()[2])
                with killed_at_the_end(new):
                    told = {systemd.recv(100), systemd.recv(100)}
                    assert told == {b"READY=1", f"MAINPID={new}".encode()}
                    async with aiohttp.ClientSession() as other, other.get(f"{url}/ready") as reply:
                        assert reply.status == 200
                    os.kill(new, signal.SIGTERM)  # systemd kills what is left when it has ended
                    while server.log.read_text().count("draining: ") < 2:
                        assert psutil.Process(new).status() != psutil.STATUS_ZOMBIE
                    worker.resume()
                    assert await running == expected
                    assert await asyncio.to_thread(server.wait, 60) == 0  # it waits for no other


@contextmanager
def killed_at_the_end(pid: int) -> Iterator[None]:
    process = psutil.Process(pid)
    try:
        yield
    finally:
        process.kill()


def taken(server: Server) -> str:
    """What the command prints when the one successor of a server serves."""
    return f"the server {successor(server)} has taken over from {server.pid}\n"


def successor(server: Server) -> int:
    """The process id of its one successor."""
    (new,) = [
        child.pid
        for child in psutil.Process(server.pid).children()
        if "serve" in (child.as_dict(["cmdline"])["cmdline"] or ())  # none of a child that ended
    ]
    return new


async def test_new_servers_that_cannot_load_or_get_ready_change_nothing_and_leave_no_files(
    tmp_path: Path,
) -> None:
    kept = ("--record", "run.jsonl", "--trace", "run.json")
    with start_server(tmp_path, *FLAGS, *kept) as server:
        url = await asyncio.to_thread(read_url, server)
        code, output = await upgrade(server, "--", "--port", "0", *kept, "--kv-memory", "1")
        assert code == 1
        assert "--kv-memory 1 bytes is less than one block" in output
        assert {name for name in os.listdir(tmp_path) if "run" in name} == {"run.json", "run.jsonl"}
        code, output = await upgrade(server, "--", "--no-such-flag")
        assert code == 1
        assert "the server goes on: podway serve: unknown flag --no-such-flag" in output
        async with aiohttp.ClientSession() as session, session.get(f"{url}/ready") as response:
            assert response.status == 200
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 60) == 0
