from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.errors import StartupError
from gateway.groups.group import TEXT_ONLY
from gateway.serve import images as opening
from gateway.serve.images import Images, open_images
from gateway.settings.model import ImageSettings
from gateway.settings.settings import load
from tests.adapters.images.pictures import checkpoint


def loaded(
    directory: Path,
    *,
    has_encoder: bool = True,
    token: str = "<|image_pad|>",
    mmproj: Path | None = None,
) -> Any:
    """Enough of a loaded model."""
    return SimpleNamespace(
        report=SimpleNamespace(encoder=object() if has_encoder else None),
        directory=directory,
        mmproj=mmproj,
        texts=SimpleNamespace(tokenizer=SimpleNamespace(special_tokens={token: 1})),
    )


async def opened(model: Any, settings: ImageSettings | None = None) -> Images:
    async with AsyncExitStack() as stack:
        return open_images(settings or ImageSettings(), model, stack)


async def test_a_model_with_an_encoder_reads_images(tmp_path: Path) -> None:
    reader, _ = await opened(loaded(checkpoint(tmp_path)))
    assert reader is not None
    assert reader.decoder.placeholder == "<|image_pad|>"
    settings = ImageSettings(media_hosts=("images.example",), image_max_tokens=100)
    assert (await opened(loaded(tmp_path), settings)).reader is not None


async def test_others_say_why_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path / "good")
    assert await opened(loaded(folder, has_encoder=False)) == Images(None, TEXT_ONLY)
    assert not caplog.messages
    unknown = checkpoint(tmp_path / "unknown", {"image_processor_type": "Other"})
    cannot = Images(None, "this server cannot read images for this model")
    assert await opened(loaded(unknown)) == cannot
    assert "the image processor Other is not supported" in caplog.text
    assert await opened(loaded(folder, token="<other>")) == cannot
    assert "the tokenizer has no special token <|image_pad|>" in caplog.text
    monkeypatch.setattr(
        opening, "find_spec", lambda name: None if name == "PIL" else find_spec(name)
    )
    assert "pip install 'podway[vision]'" in (await opened(loaded(folder))).refusal


@pytest.mark.parametrize(
    "hosts", ["127.0.0.1", "*.example", "a.example:x", "[::1]", "https://a", ""]
)
def test_media_hosts_are_names(hosts: str) -> None:
    if not hosts:
        assert load({"media_hosts": "A.example,b.example:8443"}).images.media_hosts == (
            "A.example",
            "b.example:8443",
        )
        return
    with pytest.raises(StartupError, match="--media-hosts must be names of hosts such as"):
        load({"media_hosts": hosts})
