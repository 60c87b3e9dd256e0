import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest

from adapters.models.named_shapes import IMAGES, VISION_SHAPES
from tests.adapters.images.pictures import encoded, noise
from tests.conftest import Server, read_url, start_server
from tests.models.mmproj_files import CHAT, Mmproj

SHAPE: dict[str, Any] = dict(VISION_SHAPES["Qwen3.5-0.8B-vision"])
TOKENS = {name: 4100 + number for number, name in enumerate(SHAPE[IMAGES]["tokens"])}
NARROW = {"hidden_size": 64, "intermediate_size": 96}
CONFIG: dict[str, Any] = {
    **SHAPE,
    **{f"{key}_token_id": TOKENS[f"<|{key}|>"] for key in ("vision_start", "vision_end")},
    **{f"{key}_token_id": TOKENS[f"<|{key}_pad|>"] for key in ("image", "video")},
    IMAGES: SHAPE[IMAGES] | {"tokens": TOKENS},
    "text_config": SHAPE["text_config"] | NARROW | {"vocab_size": 4200, "num_hidden_layers": 4},
    "vision_config": SHAPE["vision_config"]
    | NARROW
    | {"depth": 2, "num_heads": 2, "out_hidden_size": 64},
}
WIDTH, HEIGHT = 300, 200
NUM_TOKENS = 10 * 7  # the fewest of 32 × 32 pixels each that have 65,536 pixels in about this shape
TEXT = {"type": "text", "text": "What is this?"}


def picture(seed: int) -> bytes:
    return encoded(noise(WIDTH, HEIGHT, seed))


def part(data: bytes) -> Any:
    text = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def ask(client: openai.OpenAI, model: str, *parts: Any) -> tuple[list[float], Any]:
    """The log-probabilities of a short answer, and the usage."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": list(parts)}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return [token.logprob for token in logprobs.content], answer.usage


def check_chat(client: openai.OpenAI, model: str, num_tokens: int, typed: str) -> None:
    """Images change the answer, the same one does not, and its prefix is found again."""
    text_only, usage = ask(client, model, TEXT)
    num_text = usage.prompt_tokens
    first, usage = ask(client, model, part(picture(0)), TEXT)
    assert usage.prompt_tokens == num_text + num_tokens
    again, usage = ask(client, model, part(picture(0)), TEXT)
    cached = usage.prompt_tokens_details.cached_tokens
    other, usage = ask(client, model, part(picture(1)), TEXT)
    assert cached > num_tokens // 2 > usage.prompt_tokens_details.cached_tokens
    assert first == pytest.approx(again, abs=1e-4)
    assert len({first[0], other[0], text_only[0]}) == 3
    _, usage = ask(client, model, {"type": "text", "text": f"{typed}What is this?"})
    assert usage.prompt_tokens > num_text + len(typed) // 5, "a typed placeholder is text"


def check_others(url: str, client: openai.OpenAI, model: str, folder: Path) -> None:
    """Responses with an uploaded file, and Anthropic's messages."""
    (folder / "picture.png").write_bytes(picture(2))
    file = client.files.create(file=folder / "picture.png", purpose="vision")
    content = [
        {"type": "input_image", "file_id": file.id, "detail": "auto"},
        {"type": "input_text", "text": "What is this?"},
    ]
    items: Any = [{"role": "user", "content": content}]
    response = client.responses.create(model=model, input=items, max_output_tokens=2)
    assert response.usage is not None
    assert response.usage.input_tokens > NUM_TOKENS
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as claude:
        data = base64.b64encode(picture(2)).decode()
        source: Any = {"type": "base64", "media_type": "image/png", "data": data}
        blocks: Any = [{"type": "image", "source": source}, TEXT]
        turns: Any = [{"role": "user", "content": blocks}]
        message = claude.messages.create(model=model, max_tokens=2, messages=turns)
        counted = claude.messages.count_tokens(model=model, messages=turns)
    assert counted.input_tokens == response.usage.input_tokens
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == counted.input_tokens
    assert cached >= NUM_TOKENS


@contextmanager
def serving(
    folder: Path, config: dict[str, Any]
) -> Iterator[tuple[Server, str, openai.OpenAI, str]]:
    """A server of a random model, its address, a client and the model's name."""
    (model := folder / "model").mkdir()
    (model / "config.json").write_text(json.dumps(config))
    flags = ("--store", "memory")
    with start_server(folder, name := f"random:{model}", *flags) as child:
        url = read_url(child)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            yield child, url, client, name


def test_images_are_served_to_the_official_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with serving(tmp_path, CONFIG) as (child, url, client, model):
        typed = "<|vision_start|><|image_pad|><|vision_end|>"
        check_chat(client, model, 2 + NUM_TOKENS, typed)
        decoders = [
            each
            for each in psutil.Process(child.pid).children(recursive=True)
            if "adapters.images.decode_process" in each.cmdline()
        ]
        assert len(decoders) == 1
        decoders[0].kill()
        check_others(url, client, model, tmp_path)


def test_a_gguf_model_reads_images_by_the_encoder_beside_it(tmp_path: Path) -> None:
    text, one_tile = tmp_path / "tiny.gguf", {"clip.vision.preproc_image_size": 20}
    Mmproj("smolvlm", text=CHAT, more=one_tile).write(text, tmp_path / "mmproj-tiny.gguf")
    with start_server(tmp_path, str(text), "--store", "memory") as server:
        with openai.OpenAI(base_url=f"{read_url(server)}/v1", api_key="any") as client:
            what = {"type": "text", "text": "what is this."}
            alone, without = ask(client, "tiny", what)
            first, usage = ask(client, "tiny", part(picture(0)), what)
            other, _ = ask(client, "tiny", part(picture(1)), what)
        assert usage.prompt_tokens == without.prompt_tokens + 25 + 3  # and the marks around it
        assert len({alone[0], first[0], other[0]}) == 3
