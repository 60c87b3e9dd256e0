"""Streams beside images: the ITL of 8 streams while images of 1024 × 1024 pixels arrive, the time
to the first token behind one image alone, and a later turn on the same image.

    python -m examples.benchmarks.server.images [--models SmolVLM2-256M Qwen3.5-0.8B-vision]
        [--rounds 1] [--rate 1] [--seconds 15] [--json FILE]

A run appends its rounds to those in FILE, and writes README.md beside it.
"""

import argparse
import asyncio
import base64
import json
import time
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import uvloop
from PIL import Image

from examples.benchmarks.attacks.__main__ import LOAD_BEFORE, SERVER_FLAGS, machine
from examples.benchmarks.attacks.honest import HonestStreams
from examples.benchmarks.attacks.report import quantiles, table_head
from examples.benchmarks.layers.encoder_batches import gain
from examples.benchmarks.server.served import gauges, serving, until_idle

MODELS = ("SmolVLM2-256M", "Qwen3.5-0.8B-vision")
SIDE = 1024  # pixels
STREAMS = 8
BATCHES = Path(__file__).parents[1] / "results" / "images" / "batches.json"
COLUMNS = (
    "model",
    "one image alone, s to the first token",
    "a later turn on it, s",
    "images encoded for it",
    "ITL of 8 streams, p50 / p99 ms",
    "beside images",
    "images answered of those sent",
)
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


async def alone(session: aiohttp.ClientSession, url: str, chats: Chats, image: str) -> Figures:
    """One image, and a later turn on it."""
    first = await chats.ask(image)
    before = (await gauges(session, url))["podway_encoded_images_total"]
    later = await chats.ask(image, turns=2)
    after = (await gauges(session, url))["podway_encoded_images_total"]
    return {
        "prompt_tokens": first.prompt,
        "first_seconds": round(first.seconds, 3),
        "later_seconds": round(later.seconds, 3),
        "later_cached_tokens": later.cached,
        "later_encoded_images": int(after - before),
    }


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


async def measure(url: str, numbers: "count[int]", rate: float, seconds: float) -> Figures:
    """One round, with images that the server has not seen."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        chats = Chats(session, url, "m")
        found = await alone(session, url, chats, picture(next(numbers)))
        images = [picture(next(numbers)) for _ in range(int(seconds * rate))]
        found |= await beside(url, chats, images, rate)
        await until_idle(session, url)
    return found


def row(model: str, rounds: Sequence[Mapping[str, Any]]) -> str:
    """A row of the Markdown table: medians of the rounds."""

    def middle(name: str, side: str = "") -> float:
        return median(float((each[side] if side else each)[name]) for each in rounds)

    def ranged(name: str, side: str = "", digits: int = 1) -> str:
        values = [float((each[side] if side else each)[name]) for each in rounds]
        least, most = min(values), max(values)
        return f"{median(values):.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"

    def latencies(side: str) -> str:
        return f"{middle('p50', side):.1f} / {ranged('p99', side)}"

    cells = [
        f"`random:{model}`",
        ranged("first_seconds"),
        f"{middle('later_seconds'):.2f}",
        str(max(int(each["later_encoded_images"]) for each in rounds)),
        latencies("undisturbed"),
        latencies("beside"),
        f"{sum(int(e['answered']) for e in rounds)} of {sum(int(e['sent']) for e in rounds)}",
    ]
    return f"| {' | '.join(cells)} |"


def page(found: Mapping[str, Any]) -> str:
    """The page of the results."""
    rounds = found["models"]
    table = [table_head(COLUMNS), *(row(model, each) for model, each in rounds.items())]
    sizes = {model.split()[0]: each[0]["prompt_tokens"] for model, each in rounds.items()}
    tokens = ", ".join(f"{size} ({model})" for model, size in sizes.items())
    counts = " to ".join(map(str, sorted({len(each) for each in rounds.values()})))
    batches = json.loads(BATCHES.read_text())
    shares = [gain(times) for each in batches.values() for times in each.values()]
    return f"""# Streams beside images

`python -m examples.benchmarks.server.images`: images of {SIDE} × {SIDE} pixels, random weights in
float32 (AVX-512), {found["machine"]}; {counts} rounds, medians and in brackets ranges
([JSON](images.json)). Tokens of a prompt with one image: {tokens}.
Images arrive at {found["rate"]:g} per second for {found["seconds"]:g} s beside {STREAMS} streams.

{chr(10).join(table)}

A reply has one token, so its time is that to the first token. This machine encodes an image alone
in about the time of the second column. So at this rate images wait for each other, and their
clients leave at the end of a round; what is measured is that the streams go on. Without a goal for
the ITL the default `--prefill-slowdown` holds: an iteration takes twice as long because of prompts
and images, and up to twice that while they wait. `--itl-goal` is met at p50 and missed at p99;
images are also decoded by processes that share the cores with the worker, which may be why.
Other work ran on the machine at times, hence the ranges.

Images are encoded one by one. Computing tiles of 2 to 8 images of one size together would save
{min(shares):.1%} to {max(shares):.1%} of the CPU time of an encoder's layers (on an AMD EPYC, AVX2;
`python -m examples.benchmarks.layers.encoder_batches`, [JSON](batches.json)), so it is not built.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure streams beside images.")
    parser.add_argument("--models", nargs="+", default=MODELS, help="each with flags, if need be")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.0, help="images per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="while images arrive")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: Figures = {
        "machine": machine(),
        "load_before": LOAD_BEFORE,
        "rate": arguments.rate,
        "seconds": arguments.seconds,
        "models": {},
    }
    if arguments.json is not None and arguments.json.exists():
        found["models"] = json.loads(arguments.json.read_text())["models"]
    for model in arguments.models:
        flags = [*f"random:{model}".split(), "--served-model-name", "m", *SERVER_FLAGS]
        with serving(flags) as (_, url):
            numbers, rounds = count(), found["models"].setdefault(model, [])
            for _ in range(arguments.rounds):
                rounds.append(uvloop.run(measure(url, numbers, arguments.rate, arguments.seconds)))
                print(model, rounds[-1], flush=True)
    print(page(found))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        (arguments.json.parent / "README.md").write_text(page(found))


if __name__ == "__main__":
    main()
