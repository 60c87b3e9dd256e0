import base64
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adapters.images.decode import bytes_of_base64, decoded
from gateway.ports import UnreadableImage
from tests.adapters.images.pictures import encoded, noise

IMAGE = noise(40, 30)


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_formats_without_loss_give_the_same_pixels(kind: str) -> None:
    image = IMAGE.quantize(64).convert("RGB")
    options = {"lossless": True} if kind == "WEBP" else {}
    assert decoded(encoded(image, kind, **options)).tobytes() == image.tobytes()


def test_a_photograph_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    assert decoded(encoded(IMAGE, "JPEG", exif=exif)).size == (30, 40)
    assert decoded(encoded(IMAGE, "JPEG")).size == (40, 30)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_becomes_white(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 2, 4))
    options: dict[str, Any] = {}
    if mode == "P":
        image = Image.new("P", (4, 4), 1)
        image.putpalette([0, 0, 0, 200, 0, 0])
        image.paste(0, (0, 0, 2, 4))
        options["transparency"] = 1
    pixels = np.asarray(decoded(encoded(image if mode == "P" else image.convert(mode), **options)))
    assert pixels[:, :2].max() == 0
    assert pixels[:, 2:].min() == 255


def test_deep_and_printed_images_become_8_bits_of_rgb() -> None:
    grey = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))
    assert decoded(encoded(grey)).getpixel((0, 0)) == (128, 128, 128)
    assert decoded(encoded(Image.new("1", (4, 4), 1))).getpixel((0, 0)) == (255, 255, 255)
    printed = decoded(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    red, green, blue = printed.getpixel((4, 4))  # type: ignore[misc] # a tuple in RGB
    assert red > 200
    assert max(green, blue) < 60


def test_an_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        red, _, blue = decoded(data).getpixel((4, 4))  # type: ignore[misc] # a tuple in RGB
        assert red > 200 > 60 > blue, kind


def test_base64_may_be_wrapped_or_made_for_urls_but_has_no_other_characters() -> None:
    data = bytes(range(256))
    wrapped = base64.encodebytes(data)
    assert bytes_of_base64(wrapped) == data
    assert bytes_of_base64(base64.urlsafe_b64encode(data).rstrip(b"=")) == data
    for text in (b"ab?d", b"a", "äöü".encode()):
        with pytest.raises(UnreadableImage, match="is not valid base64"):
            bytes_of_base64(text)
