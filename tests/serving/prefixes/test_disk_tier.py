import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import Server, read_url, start_server

STORY = "Once upon a time there was a fox. It lived in a forest and asked: what is 2 + 3? " * 8
FLAGS = ("--threads", "1", "--store", "memory", "--kv-slots", "4096")


def started(directory: Path, *flags: str) -> Server:
    return start_server(directory, *FLAGS, "--disk-kv", str(directory / "kv"), *flags)


def chat(url: str, *turns: str) -> dict[str, Any]:
    """The answer to the last of these messages."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    body = {"model": "builtin", "messages": messages, "max_tokens": 24, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def text(answer: dict[str, Any]) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


def until_saved(url: str, tier: str = "disk") -> None:
    """Wait until all cached blocks are in a tier."""
    for _ in range(600):
        slots = {
            line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
            for line in httpx.get(f"{url}/metrics").text.splitlines()
            if line.startswith("podway_kv_slots{")
        }
        saved = slots[f'podway_kv_slots{{state="cached",tier="{tier}"}}']
        if 0 < saved >= slots['podway_kv_slots{state="cached",tier="device"}']:
            return
        time.sleep(0.05)
    raise AssertionError(f"not saved: {slots}")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_next_message_of_a_chat_finds_its_prefix_after_a_restart(
    tmp_path: Path, end: signal.Signals
) -> None:
    with started(tmp_path) as server:
        url = read_url(server)
        first = chat(url, STORY)
        turns = (STORY, text(first), "And what is 4 + 4?")
        expected = text(chat(url, *turns))
        if end is signal.SIGKILL:
            until_saved(url)
        server.send_signal(end)
        server.wait(60)
    with started(tmp_path) as server:
        url = read_url(server)
        again = chat(url, *turns)
        assert cached(again) >= first["usage"]["prompt_tokens"]
        assert text(again) == expected
        assert cached(chat(url, "Something else. " * 40)) == 0
