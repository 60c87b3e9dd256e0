import json
import signal
import time
from pathlib import Path
from typing import Any

import openai

from tests.conftest import read_url, start_server
from tests.serving.client import PAUSE

NUM_LINES = 40


def lines() -> bytes:
    bodies = [
        {
            "model": "builtin",
            "messages": [{"role": "user", "content": f"What is {i} + 3?"}],
            "max_tokens": 40,
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(NUM_LINES)
    ]
    return b"\n".join(
        json.dumps(
            {"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        ).encode()
        for i, body in enumerate(bodies)
    )


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def test_a_kill_during_a_batch_loses_and_repeats_no_line(tmp_path: Path) -> None:
    flags = ("--store", str(tmp_path / "store.sqlite"), "--max-batch-size", "8")
    with start_server(tmp_path, *flags) as server, client_of(read_url(server)) as client:
        file = client.files.create(file=lines(), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        done = until(client, batch.id, 10)
        assert done < NUM_LINES
        server.send_signal(signal.SIGKILL)
        server.wait()
    with start_server(tmp_path, *flags) as server, client_of(read_url(server)) as client:
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        assert counts.completed >= done
        until(client, batch.id, NUM_LINES)
        ended = until_completed(client, batch.id)
        output = client.files.content(ended.output_file_id).text.splitlines()
        answers = [json.loads(line) for line in output]
        assert [answer["custom_id"] for answer in answers] == [f"q{i}" for i in range(NUM_LINES)]
        assert all(answer["response"]["status_code"] == 200 for answer in answers)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def until(client: openai.OpenAI, batch_id: str, count: int) -> int:
    """Ask until so many lines are answered; how many are then."""
    limit = time.monotonic() + 100
    while time.monotonic() < limit:
        counts = client.batches.retrieve(batch_id).request_counts
        if counts is not None and counts.completed >= count:
            return counts.completed
        time.sleep(PAUSE)
    raise AssertionError("too slow")


def until_completed(client: openai.OpenAI, batch_id: str) -> Any:
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        batch = client.batches.retrieve(batch_id)
        if batch.status == "completed":
            return batch
        time.sleep(PAUSE)
    raise AssertionError("too slow")
