"""Attacks with images on a model that reads them: files that are none, or are costly to decode, and
addresses that no server should fetch from."""

import base64
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from adapters.models.named_shapes import IMAGES, llama_like, smolvlm2
from examples.benchmarks.attacks.bodies import CHAT, chat
from examples.benchmarks.attacks.sending import Attack, Attacker

SIDE = 1024
LARGEST = 8_192  # pixels a side of the largest image that is decoded
REST_SECONDS = {"images of 8,192 × 8,192": 12.0}  # until the last is decoded; its client has left
URLS = (
    "https://169.254.169.254/latest/meta-data",
    "https://localhost:1/picture.png",  # a host that is named, with an address that is not public
    "http://localhost:1/picture.png",
    "file:///etc/passwd",
)
FLAGS = ("--media-hosts", "localhost,localhost:1")


def write_model(scratch: Path) -> str:
    """A model of random weights that reads images, about as fast as the built-in one; returns its
    name for `podway serve`."""
    folder = scratch / "images"
    folder.mkdir(exist_ok=True)
    text = llama_like("LlamaForCausalLM", 4, 128, 384, 4, 2, 49280, 32_768, 1e4, tied=True)
    config: dict[str, Any] = {**smolvlm2(text, 2, 64, 96, 2)}
    config["vision_config"] |= {"image_size": 64}
    config[IMAGES]["preprocessor"] |= {
        "size": {"longest_edge": 128},
        "max_image_size": {"longest_edge": 64},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return f"random:{folder}"


@cache
def picture(kind: str, width: int = SIDE, height: int = SIDE) -> bytes:
    """A file of random pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


@cache
def black(width: int, height: int, num_bytes: int | None = None) -> bytes:
    """A small PNG file of so many pixels, or of which only so many bytes are there."""
    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = bytes((width + 1) * height if num_bytes is None else num_bytes)
    chunks = ((b"IHDR", size), (b"IDAT", zlib.compress(pixels, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


def _asks(attacker: Attacker, urls: Sequence[str]) -> bytes:
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": u}} for u in urls]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}]
    return json.dumps({"model": attacker.model, **chat(messages=messages)}).encode()


def _showing(make: Callable[[int], Sequence[bytes]], clients: int = 4) -> Attack:
    """Other files each time; those of number n are told from those of others by n behind them."""

    async def attack(attacker: Attacker) -> None:
        async def one(number: int) -> None:
            files = [data + number.to_bytes(4, "big") for data in make(number)]
            texts = [base64.b64encode(data).decode() for data in files]
            urls = [f"data:image/png;base64,{text}" for text in texts]
            await attacker.send("POST", CHAT, _asks(attacker, urls))

        await attacker.repeat(one, clients)

    return attack


async def _fifty_megabytes(attacker: Attacker) -> None:
    """A data URL of 50 MB, whose body is larger than a server reads."""
    data = _asks(attacker, [f"data:image/png;base64,{'A' * 67_000_000}"])
    await attacker.repeat(lambda _: attacker.send("POST", CHAT, data), 2)


async def _private(attacker: Attacker) -> None:
    """URLs of addresses in the server's own networks."""

    async def one(number: int) -> None:
        await attacker.send("POST", CHAT, _asks(attacker, [URLS[number % len(URLS)]]))

    await attacker.repeat(one, 8)


OTHERS = (
    b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
    b"%PDF-1.7\n%%EOF",
    b"hello",
    b"",
)
ATTACKS: Mapping[str, Attack] = {
    "truncated images": _showing(lambda n: [picture(("PNG", "JPEG")[n % 2])[:-1000]]),
    "images of 8,192 × 8,192": _showing(lambda _: [black(LARGEST, LARGEST)]),
    "headers of 16,000 × 16,000": _showing(lambda _: [black(16_000, 16_000, 100)]),
    "images of 1 × 1": _showing(lambda _: [picture("PNG", 1, 1)]),
    "images of 65,000 × 1": _showing(lambda _: [black(65_000, 1)]),
    "files of other types": _showing(lambda n: [OTHERS[n % len(OTHERS)]], 8),
    "100 images": _showing(lambda _: [picture("PNG", 64, 64)] * 100),
    "a data URL of 50 MB": _fifty_megabytes,
    "URLs of private addresses": _private,
}
