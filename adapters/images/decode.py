"""Bytes to an RGB image by Pillow, with checks before it decodes. The texts of errors are ours.

The largest image, a photograph of 67 megapixels, takes 0.9 GB while it is decoded.
"""

import binascii
import warnings
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gateway.ports import UnreadableImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SIDE = 16_384
MAX_PIXELS = 1 << 26
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # 16 bits of grey

_UNREADABLE = "is not a PNG, JPEG, WebP or GIF image"
_DAMAGED = "is truncated or damaged"


def bytes_of_base64(text: bytes) -> bytes:
    """The bytes that are written as base64, in either alphabet. Raises `UnreadableImage`."""
    text = text.translate(_STANDARD, b" \t\r\n")
    try:
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
    except binascii.Error:
        raise UnreadableImage("is not valid base64") from None


def decoded(data: bytes) -> Image.Image:
    """The first frame of an image, upright, in RGB, over white. Raises `UnreadableImage`."""
    Image.MAX_IMAGE_PIXELS = None  # the bounds here are checked first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(BytesIO(data), formats=FORMATS) as image:
                _check_size(*image.size)
                image.load()
                return _rgb(ImageOps.exif_transpose(image))
        except UnidentifiedImageError:
            raise UnreadableImage(_UNREADABLE) from None
        except (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, TypeError):
            raise UnreadableImage(_DAMAGED) from None


def _check_size(width: int, height: int) -> None:
    if max(width, height) > MAX_SIDE:
        raise UnreadableImage(
            f"has {width} × {height} pixels; a side of at most {MAX_SIDE} pixels is allowed"
        )
    if width * height > MAX_PIXELS:
        millions = MAX_PIXELS // 1_000_000
        raise UnreadableImage(
            f"has {width} × {height} pixels; at most {millions} million pixels are allowed"
        )
    if not width * height:
        raise UnreadableImage("has no pixels")


def _rgb(image: Image.Image) -> Image.Image:
    """The image in RGB; what is transparent becomes white."""
    if image.mode in DEEP_MODES:
        grey = np.asarray(image).astype(np.int64) >> 8
        image = Image.fromarray(np.clip(grey, 0, 255).astype(np.uint8))
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


_STANDARD = bytes.maketrans(b"-_", b"+/")
