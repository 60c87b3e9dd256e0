"""Images for tests: good ones, and a corpus of bad ones with what is said about them."""

import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 1 << 20},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
FORMATS = "is not a PNG, JPEG, WebP or GIF image"
DAMAGED = "is truncated or damaged"


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """An RGB image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The image as a file."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG file of which nothing but the size is right."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", size), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bad_images() -> dict[str, tuple[bytes, str]]:
    """By name, files that are no images, and what is said about them."""
    png, jpeg = encoded(noise(64, 48)), encoded(noise(64, 48), "JPEG")
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
    return {
        "empty": (b"", FORMATS),
        "text": (b"hello", FORMATS),
        "svg": (svg, FORMATS),
        "pdf": (b"%PDF-1.7\n%%EOF", FORMATS),
        "bmp": (encoded(noise(8, 8), "BMP"), FORMATS),
        "tiff": (encoded(noise(8, 8), "TIFF"), FORMATS),
        "jpeg 2000 with a PNG's name": (b"\0\0\0\x0cjP  \r\n\x87\n" + b"\0" * 64, FORMATS),
        "truncated PNG": (png[: len(png) // 2], DAMAGED),
        "truncated JPEG": (jpeg[: len(jpeg) // 2], DAMAGED),
        "PNG with a wrong checksum": (png[:60] + b"\xff" + png[61:], DAMAGED),
        "bomb": (png_header(16_000, 16_000), "at most 67 million pixels are allowed"),
        "long": (png_header(65_000, 1), "a side of at most 16384 pixels is allowed"),
        "narrow": (encoded(noise(1, 500)), "is more than 200 times as long as it is wide"),
        "size of a PNG that is not there": (png_header(2_000, 2_000), DAMAGED),
    }


def checkpoint(folder: Path, settings: object = None) -> Path:
    """A folder with the settings of an image processor."""
    folder.mkdir(exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings or QWEN))
    return folder
