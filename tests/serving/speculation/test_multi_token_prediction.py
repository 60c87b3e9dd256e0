"""A whole server whose drafts come from the model's layer for multi-token prediction: the same
texts as without, metrics of the drafts, and answers that go on when the worker dies."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.conftest import Server, read_url, start_server
from tests.models.mtp import make_chat_mtp_checkpoint
from tests.serving.client import Json, metrics, stream, until_idle

pytestmark = pytest.mark.process

CONFIG = '{"method": "mtp", "num_speculative_tokens": 3}'
FLAGS = ("--threads", "1", "--store", "memory", "--max-model-len", "512")
LENGTH = 200


def started(directory: Path, checkpoint: Path, *flags: str) -> Server:
    directory.mkdir()
    return start_server(directory, str(checkpoint), "--served-model-name", "m", *FLAGS, *flags)


def chat_of(number: int, temperature: float) -> Json:
    message = {"role": "user", "content": f"Say {number}."}
    sampling = {"temperature": temperature, "seed": number, "ignore_eos": True}
    return {"model": "m", "messages": [message], "max_tokens": LENGTH, **sampling}


BODIES = [chat_of(number, temperature) for number, temperature in enumerate((0, 1, 1))]


async def streamed(
    session: aiohttp.ClientSession, url: str, body: Json, kills: Sequence[int] = ()
) -> str:
    """The content of a streamed chat; behind its first tokens the processes `kills` are killed."""
    text, pids = "", list(kills)
    async for chunk in stream(session, url, body, "/v1/chat/completions"):
        text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        while text and pids:
            os.kill(pids.pop(), signal.SIGKILL)
    return text


async def answers(url: str) -> list[str]:
    """Each chat alone, then all at once."""
    async with aiohttp.ClientSession() as session:
        texts = [await streamed(session, url, body) for body in BODIES]
        return texts + await asyncio.gather(*(streamed(session, url, body) for body in BODIES))


async def test_a_server_with_mtp_answers_the_same_texts_and_counts_its_drafts(
    tmp_path: Path,
) -> None:
    checkpoint = make_chat_mtp_checkpoint(tmp_path / "model")
    with started(tmp_path / "off", checkpoint) as server:
        expected = await answers(read_url(server))
    assert expected == 2 * expected[: len(BODIES)]
    assert len(set(expected)) == len(BODIES)
    with started(tmp_path / "on", checkpoint, "--speculative-config", CONFIG) as server:
        url = read_url(server)
        assert await answers(url) == expected
        async with aiohttp.ClientSession() as session:
            (worker,) = psutil.Process(server.pid).children()
            text = await streamed(session, url, BODIES[0], [worker.pid])
            assert text == expected[0]
            counts = await until_idle(session, url)
            drafts, accepted = (
                counts[f"vllm:spec_decode_num_{name}_tokens_total/model_name=m"]
                for name in ("draft", "accepted")
            )
            assert drafts >= accepted > 0
            at = "vllm:spec_decode_num_accepted_tokens_per_pos_total/model_name=m/position="
            assert sum(counts[f"{at}{position}"] for position in range(3)) == accepted
            assert (await metrics(session, url))["podway_worker_restarts_total"] == 1
