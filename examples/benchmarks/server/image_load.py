"""Chats about images beside streams, for benchmarks: the time of one image alone, of a later turn
on it, and the ITL of 8 streams while images of 1024 × 1024 pixels arrive."""

import asyncio
import base64
import time
from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from PIL import Image

from examples.benchmarks.attacks.honest import HonestStreams
from examples.benchmarks.attacks.report import quantiles

SIDE = 1024  # pixels
STREAMS = 8
Figures = dict[str, Any]


class Reply(NamedTuple):
    """Seconds to a reply of one token, the prompt's tokens (0: not told), and the cached ones."""

    seconds: float
    prompt: int
    cached: int


def picture(number: int) -> str:
    """A data URL of a smooth random image, another one for each number."""
    colours = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(colours).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


class Chats:
    """Chats about images with a server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def ask(self, image: str, turns: int = 1) -> Reply:
        """The first question about an image, or a later one."""
        asked: list[dict[str, object]] = [
            {"type": "image_url", "image_url": {"url": image}},
            {"type": "text", "text": "What is in this image?"},
        ]
        messages: list[dict[str, object]] = [{"role": "user", "content": asked}]
        for _ in range(turns - 1):
            messages.append({"role": "assistant", "content": "Coloured clouds."})
            messages.append({"role": "user", "content": "Which colours are they?"})
        body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 0}
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            text = await response.json()
            assert response.status == 200, text
        usage = text.get("usage", {})
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Reply(time.perf_counter() - began, usage.get("prompt_tokens", 0), cached)


async def beside(url: str, chats: Chats, images: Sequence[str], rate: float) -> Figures:
    """Streams undisturbed, then while the images arrive at so many per second; what is not
    answered by then is left. A delay that has not ended by then counts as long as it was."""
    streams = HonestStreams(url, "m")
    tasks = [asyncio.create_task(streams.stream(number)) for number in range(STREAMS)]
    while len(streams.last) < STREAMS and not streams.failures:
        await asyncio.wait(tasks, timeout=0.05)
    began = time.perf_counter()
    await asyncio.sleep(len(images) / rate / 2)
    sent = time.perf_counter()
    asked = []
    for image in images:
        asked.append(asyncio.create_task(chats.ask(image)))
        await asyncio.sleep(1 / rate)
    ended = time.perf_counter()
    answered = [task.result().seconds for task in asked if task.done()]
    for task in [*asked, *tasks]:
        task.cancel()
    await asyncio.gather(*asked, *tasks, return_exceptions=True)
    assert not streams.failures, streams.failures
    gaps = [*streams.between(sent, ended), *(ended - at for at in streams.last.values())]
    return {
        "undisturbed": quantiles(streams.between(began, sent)),
        "beside": quantiles(sorted(gaps)),
        "longest_ms": round(1e3 * max(gaps), 1),
        "sent": len(images),
        "answered": len(answered),
        "answer_seconds": [round(each, 3) for each in answered],
    }
