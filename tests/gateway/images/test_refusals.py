import asyncio

import pytest

from gateway.images.reader import ImageLimits
from tests.gateway.forms import a_form, upload
from tests.gateway.images.requests import (
    MESSAGES,
    RED,
    RESPONSES,
    answer_of,
    ask,
    data_url,
    error_of,
    image,
    seen,
    text,
)
from tests.gateway.rig import CHAT, MODEL, Rig, Setting, played
from tests.gateway.scripted_model import BAD, LOST, ScriptedDecoder


@played(
    Setting(
        decoder=ScriptedDecoder(), image_limits=ImageLimits(max_bytes=1000), max_body_bytes=2000
    )
)
async def test_a_body_or_an_image_that_is_too_large_is_refused_as_such(rig: Rig) -> None:
    error = await error_of(rig, CHAT, ask(image(b"x" * 2000)), 413)
    assert error["code"] == "request_too_large"
    error = await error_of(rig, CHAT, ask(image(b"x" * 1100)))
    assert error["message"].endswith("has more than 0 MiB.")
    file = (await upload(rig.client, a_form(b"x" * 1100, {"purpose": "vision"}))).json
    part = {"type": "image_url", "image_url": {"file_id": file["id"]}}
    assert (await error_of(rig, CHAT, ask(part)))["param"] == "messages[0].content[0].image_url"
    assert not seen(rig)


@played(Setting(decoder=ScriptedDecoder(), keys=("a=one", "b=two")))
async def test_uploaded_files_are_images_for_their_owner_only(rig: Rig) -> None:
    keys = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    file = (await upload(rig.client, a_form(RED, {"purpose": "vision"}), keys[0])).json
    part = {"type": "image_url", "image_url": {"file_id": file["id"]}}
    item = {"type": "input_image", "file_id": file["id"]}
    bodies = [
        (CHAT, ask(part)),
        (RESPONSES, {"model": MODEL, "input": [{"role": "user", "content": [item]}]}),
    ]
    for path, body in bodies:
        await answer_of(rig, path, body, keys[0])
        error = await error_of(rig, path, body, 404, keys[1])
        fields = ("messages[0].content[0].image_url", "input[0].content[0]")
        assert error["param"] in fields
    assert seen(rig)[0][0] == RED


BAD_URLS = {
    "": "is not a data URL",
    "data:": "is not a data URL such as",
    "data:image/png;base64": "is not a data URL such as",
    "data:image/svg+xml;base64,AAAA": "is of the type 'image/svg+xml'; allowed are image/png",
    "data:application/pdf;base64,AAAA": "is a PDF. Files such as PDFs are not read",
    "data:image/png,AAAA": "is a data URL that is not base64",
    "http://169.254.169.254/latest": "has a URL that this server does not fetch",
    "https://example.com/a.png": "has a URL that this server does not fetch",
    "file:///etc/passwd": "has a URL that this server does not fetch",
    data_url(BAD): "is truncated or damaged",
}


@pytest.mark.parametrize("url", BAD_URLS)
@played(Setting(decoder=ScriptedDecoder()))
async def test_a_bad_image_is_refused_by_the_name_of_its_field(rig: Rig, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    error = await error_of(rig, CHAT, ask(text("a"), image(RED), part))
    field = "messages[0].content[2].image_url"
    assert error["param"] == field
    assert error["message"].startswith(f"The image in '{field}' {BAD_URLS[url]}")
    item = {"type": "input_image", "image_url": url}
    body = {"model": MODEL, "input": [{"role": "user", "content": [item]}]}
    error = await error_of(rig, RESPONSES, body)
    assert error["param"] == "input[0].content[0]"
    if url.startswith("data:image/png;base64,"):
        return
    block = {"type": "image", "source": {"type": "url", "url": url}}
    turns = [{"role": "user", "content": [block]}]
    error = await error_of(rig, MESSAGES, {"model": MODEL, "max_tokens": 9, "messages": turns})
    assert "'messages[0].content[0].source'" in error["message"]


@played(Setting(decoder=ScriptedDecoder()))
async def test_an_image_that_cannot_be_decoded_now_may_be_sent_again(rig: Rig) -> None:
    error = await error_of(rig, CHAT, ask(image(LOST)), status=503)
    assert error["message"].startswith(
        "The image in 'messages[0].content[0].image_url' cannot be read now: "
    )


@played(Setting(decoder=ScriptedDecoder()))
async def test_images_are_counted_before_any_is_decoded(rig: Rig) -> None:
    error = await error_of(rig, CHAT, ask(*[image(RED)] * 100))
    assert error["message"] == "A request may have at most 64 images, but got 100."
    assert error["param"] == "messages[0].content[64].image_url"
    assert not seen(rig)


@played(Setting(decoder=ScriptedDecoder(), context=30))
async def test_images_with_more_tokens_than_the_context_are_refused_as_they_are_counted(
    rig: Rig,
) -> None:
    parts = [image(bytes([number])) for number in range(60)]
    error = await error_of(rig, CHAT, ask(*parts))
    assert error["code"] == "context_length_exceeded"
    assert len(seen(rig)) == 11


@played(Setting(decoder=ScriptedDecoder()))
async def test_only_users_and_tools_send_images_and_files_are_refused_by_name(rig: Rig) -> None:
    for role in ("system", "assistant", "developer"):
        error = await error_of(rig, CHAT, ask(image(RED), role=role))
        assert "Only text input is supported" in error["message"]
    file = {"type": "file", "file": {"file_data": "data:application/pdf;base64,"}}
    error = await error_of(rig, CHAT, ask(file))
    assert "Files such as PDFs are not read" in error["message"]
    item = {"type": "input_file", "file_id": "file-1"}
    body = {"model": MODEL, "input": [{"role": "user", "content": [item]}]}
    assert "PDFs are not read" in (await error_of(rig, RESPONSES, body))["message"]
    for source in ({}, {"url": "x", "file_id": "y"}):
        error = await error_of(rig, CHAT, ask({"type": "image_url", "image_url": source}))
        assert "expected either a 'url' or a 'file_id'" in error["message"]


@played()
async def test_a_model_that_reads_text_only_says_so(rig: Rig) -> None:
    block = {"type": "image", "source": {"type": "url", "url": "https://x/y"}}
    turns = [{"role": "user", "content": [block]}]
    error = await error_of(rig, CHAT, ask(image(RED)))
    assert (error["code"], error["param"]) == (
        "unsupported_model",
        "messages[0].content[0].image_url",
    )
    assert error["message"].endswith("is an image, and this model reads text only.")
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        error = await error_of(rig, path, {"model": MODEL, "max_tokens": 9, "messages": turns})
        assert error["message"].startswith("'messages[0].content[0].source' is an image")


@played(Setting(step=0.001, decoder=ScriptedDecoder()), run=asyncio.run)
async def test_a_template_without_images_is_named_instead_of_dropping_them(rig: Rig) -> None:
    body = {**ask(image(RED)), "chat_template": "{% for m in messages %}x{% endfor %}"}
    error = await error_of(rig, CHAT, body)
    assert "template writes 0 of the 1 images" in error["message"]


@played(Setting(decoder=ScriptedDecoder(), keys=("a=one", "b=two")))
async def test_another_prefix_domain_does_not_find_what_was_decoded(rig: Rig) -> None:
    for key in ("one", "two", "one"):
        headers = {"authorization": f"Bearer {key}"}
        await answer_of(rig, CHAT, ask(image(RED)), headers)
    assert len(seen(rig)) == 2
