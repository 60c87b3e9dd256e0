"""Images in all three APIs become the same prompt; bad ones are refused by their field's name."""

import asyncio
import base64
from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest

from engine.media import Span
from gateway.images.reader import LOW_TOKENS, ImageLimits
from tests.gateway.forms import a_form, a_line, ended, started, upload
from tests.gateway.rig import CHAT, MODEL, Rig, Setting, chat, play
from tests.gateway.scripted_model import BAD, END, LOST, ScriptedDecoder

RED, BLUE = b"red pixels", b"blue pixels"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
Json = dict[str, Any]


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes, **fields: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}


def text(content: str) -> Json:
    return {"type": "text", "text": content}


def ask(*content: Json, role: str = "user", **fields: Any) -> Json:
    return chat(messages=[{"role": role, "content": list(content), **fields}])


def seen(rig: Rig) -> list[tuple[bytes, int]]:
    assert rig.service.model.images is not None
    decoder = rig.service.model.images.decoder
    assert isinstance(decoder, ScriptedDecoder), "from the setting"
    return decoder.seen


def ids(*pieces: str | int) -> tuple[int, ...]:
    """The ids of texts, and so many tokens of an image."""
    lists = (list(p.encode()) if isinstance(p, str) else [END] * p for p in pieces)
    return tuple(chain.from_iterable(lists))


async def answer_of(
    rig: Rig, path: str, body: Json, headers: Mapping[str, str] | None = None
) -> Json:
    async with rig.client.post(path, body, headers) as exchange:
        answer: Json = await exchange.json()
        assert exchange.status == 200, answer
    return answer


async def error_of(
    rig: Rig, path: str, body: Json, status: int = 400, headers: Mapping[str, str] | None = None
) -> Json:
    async with rig.client.post(path, body, headers) as exchange:
        error: Json = (await exchange.json())["error"]
        assert exchange.status == status, error
    for word in ("0x", "/usr", "PIL", "Traceback", "object at"):
        assert word not in error["message"]
    return error


def test_an_image_in_every_api_is_the_same_prompt_and_counts_in_usage() -> None:
    anthropic = {
        "type": "image",
        "source": {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(RED).decode(),
        },
    }
    item = {"type": "input_image", "image_url": data_url(RED), "detail": "auto"}

    async def scene(rig: Rig) -> None:
        answer = await answer_of(rig, CHAT, ask(text("a"), image(RED), text("b")))
        assert answer["usage"]["prompt_tokens"] == len("user:a[") + 3 + len("]b\n")
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 3
        content = [text("a"), anthropic, text("b")]
        body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
        answer = await answer_of(rig, MESSAGES, body)
        assert answer["usage"]["input_tokens"] == len("user:a[") + 3 + len("]b\n")
        count = await answer_of(rig, f"{MESSAGES}/count_tokens", body)
        assert count == {"input_tokens": len("user:a[") + 3 + len("]b\n")}
        parts = [{"type": "input_text", "text": "a"}, item, {"type": "input_text", "text": "b"}]
        body = {"model": MODEL, "input": [{"role": "user", "content": parts}]}
        answer = await answer_of(rig, RESPONSES, body)
        assert answer["usage"]["input_tokens"] == len("user:a[") + 3 + len("]b\n")

    rig = play(scene, Setting(decoder=ScriptedDecoder(), prefix_cache=False))
    assert {request.spec.prompt for request in rig.ended} == {ids("user:a[", 3, "]b\n")}
    assert len({request.spec.spans for request in rig.ended}) == 1
    assert [data for data, _ in seen(rig)] == [RED], "it is kept after the first request"


def test_several_images_have_spans_of_their_own_and_share_no_prefix() -> None:
    async def scene(rig: Rig) -> None:
        for second in (RED, BLUE):
            await answer_of(rig, CHAT, ask(image(RED), text("x"), image(second)))

    rig = play(scene, Setting(decoder=ScriptedDecoder(num_tiles=2)))
    first, other = (request.spec for request in rig.ended)
    assert first.prompt == other.prompt == ids("user:[", 6, "]x[", 6, "]\n")
    assert [(s.start, s.length) for s in first.spans] == [(6, 3), (9, 3), (15, 3), (18, 3)]
    assert first.spans[0] == other.spans[0] == Span(6, 3, first.spans[1].digest)
    assert first.spans[2].digest != other.spans[2].digest
    assert rig.ended[1].num_cached == 15


def test_a_text_that_looks_like_a_placeholder_stays_text() -> None:
    async def scene(rig: Rig) -> None:
        parts = [text("<ima"), text("ge> <row>"), image(RED), text("\ufdd0<im\ufdd0age>")]
        await answer_of(rig, CHAT, ask(*parts))
        await answer_of(rig, CHAT, ask(text("<image>")))

    rig = play(scene, Setting(decoder=ScriptedDecoder()))
    with_image, without = (request.spec for request in rig.ended)
    assert with_image.prompt == ids("user:<image> <row>[", 3, "]<image>\n")
    assert without.prompt == ids("user:<image>\n")
    assert (len(with_image.spans), len(without.spans)) == (1, 0)


def test_tokens_that_stand_for_images_have_no_log_probabilities() -> None:
    async def scene(rig: Rig) -> None:
        answer = await answer_of(rig, CHAT, {**ask(image(RED)), "prompt_logprobs": 0})
        has = [each is not None for each in answer["prompt_logprobs"]]
        assert has == [False] + 5 * [True] + 3 * [False] + 2 * [True]

    rig = play(scene, Setting(decoder=ScriptedDecoder()))
    assert rig.ended[0].spec.prompt == ids("user:[", 3, "]\n")


def test_detail_low_has_fewer_tokens() -> None:
    async def scene(rig: Rig) -> None:
        for detail in ("low", "high", "auto", "original"):
            await answer_of(rig, CHAT, ask(image(RED, detail=detail)))
        error = await error_of(rig, CHAT, ask(image(RED, detail="tiny")))
        assert error["param"] == "messages[0].content[0].image_url.detail"

    rig = play(scene, Setting(decoder=ScriptedDecoder(), image_limits=ImageLimits(max_tokens=900)))
    assert seen(rig) == [(RED, LOW_TOKENS), (RED, 900)]


def test_results_of_tools_may_have_images() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    result = [{"type": "text", "text": "shot"}, {"type": "image", "source": source}]

    async def scene(rig: Rig) -> None:
        use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
        done = {"type": "tool_result", "tool_use_id": "t", "content": result}
        turns = [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [done, text("so?")]},
        ]
        body = {"model": MODEL, "max_tokens": 9, "messages": turns}
        await answer_of(rig, MESSAGES, body)
        output = [
            {"type": "input_text", "text": "shot"},
            {"type": "input_image", "image_url": data_url(RED)},
        ]
        call = {"type": "function_call", "call_id": "t", "name": "f", "arguments": "{}"}
        answer = {"type": "function_call_output", "call_id": "t", "output": output}
        body = {"model": MODEL, "input": [{"role": "user", "content": "go"}, call, answer]}
        await answer_of(rig, RESPONSES, body)

    rig = play(scene, Setting(decoder=ScriptedDecoder()))
    prompts = [request.spec.prompt for request in rig.ended]
    assert prompts[0] == ids("user:go\nassistant:\ntool:shot[", 3, "]\nuser:so?\n")
    assert prompts[1] == ids("user:go\nassistant:\ntool:shot[", 3, "]\n")


def test_a_response_that_continues_another_one_has_its_images() -> None:
    item = {"type": "input_image", "image_url": data_url(RED)}

    async def scene(rig: Rig) -> None:
        body = {"model": MODEL, "input": [{"role": "user", "content": [item]}]}
        first = await answer_of(rig, RESPONSES, body)
        again = {"model": MODEL, "input": "more", "previous_response_id": first["id"]}
        await answer_of(rig, RESPONSES, again)
        async with rig.client.get(f"{RESPONSES}/{first['id']}/input_items") as exchange:
            items = (await exchange.json())["data"]
        assert items[0]["content"][0] == {**item, "file_id": None, "detail": "auto"}

    rig = play(scene, Setting(decoder=ScriptedDecoder()))
    spans = [request.spec.spans for request in rig.ended]
    assert spans[0] == spans[1] != ()


def test_the_oldest_images_are_left_out_where_the_context_is_full() -> None:
    async def scene(rig: Rig) -> None:
        turns = [
            {"role": "user", "content": [{"type": "input_image", "image_url": data_url(data)}]}
            for data in (RED, BLUE)
        ]
        body = {"model": MODEL, "input": turns, "truncation": "auto", "max_output_tokens": 10}
        await answer_of(rig, RESPONSES, body)

    rig = play(scene, Setting(decoder=ScriptedDecoder(), context=24))
    assert rig.ended[0].spec.prompt == ids("user:[", 3, "]\n")
    assert sorted(data for data, _ in seen(rig)) == [BLUE, RED]


def test_a_cut_never_divides_an_image() -> None:
    async def scene(rig: Rig) -> None:
        for keep in (9, 6, 5, 4):
            body = {**ask(image(RED), text("abc")), "truncate_prompt_tokens": keep}
            await answer_of(rig, CHAT, body)

    rig = play(scene, Setting(decoder=ScriptedDecoder(), prefix_cache=False))
    whole, *others = [request.spec for request in rig.ended]
    assert (whole.prompt, [s.start for s in whole.spans]) == (ids("[", 3, "]abc\n"), [1])
    assert {spec.prompt for spec in others[:2]} == {ids("]abc\n")}
    assert others[2].prompt == ids("abc\n")
    assert not any(spec.spans for spec in others)


def test_breakpoints_are_counted_with_the_images_before_them() -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    first = [text("a"), image(RED), {**text("b"), **mark}, image(BLUE), {**text("c"), **mark}]

    async def scene(rig: Rig) -> None:
        turns = [{"role": "user", "content": first}, {"role": "user", "content": "d"}]
        body = chat(messages=turns, prompt_cache_options={"mode": "explicit"})
        await answer_of(rig, CHAT, body)
        await answer_of(rig, CHAT, ask(*first))

    rig = play(scene, Setting(decoder=ScriptedDecoder()))
    ends = [len(ids(*pieces)) for pieces in (("user:a[", 3, "]b"), ("user:a[", 3, "]b[", 3, "]c"))]
    assert rig.ended[0].spec.prompt == ids("user:a[", 3, "]b[", 3, "]c\nuser:d\n")
    assert rig.ended[0].spec.checkpoints[:2] == tuple(ends)  # others are behind the images
    assert rig.ended[1].num_cached == ends[1]


def test_a_batch_has_images() -> None:
    async def scene(rig: Rig) -> None:
        body = ask(image(RED))
        batch_id = await started(rig, a_line("one", body) + b"\n" + a_line("two", ask(image(BAD))))
        batch = await ended(rig, batch_id)
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}

    rig = play(scene, Setting(decoder=ScriptedDecoder()))
    assert rig.ended[0].spec.prompt == ids("user:[", 3, "]\n")


def test_a_body_or_an_image_that_is_too_large_is_refused_as_such() -> None:
    async def scene(rig: Rig) -> None:
        error = await error_of(rig, CHAT, ask(image(b"x" * 2000)), 413)
        assert error["code"] == "request_too_large"
        error = await error_of(rig, CHAT, ask(image(b"x" * 1100)))
        assert error["message"].endswith("has more than 0 MiB.")
        async with upload(rig.client, a_form(b"x" * 1100, {"purpose": "vision"})) as exchange:
            file = await exchange.json()
        part = {"type": "image_url", "image_url": {"file_id": file["id"]}}
        assert (await error_of(rig, CHAT, ask(part)))["param"] == "messages[0].content[0].image_url"
        assert not seen(rig)

    limits = ImageLimits(max_bytes=1000)
    play(scene, Setting(decoder=ScriptedDecoder(), image_limits=limits, max_body_bytes=2000))


def test_uploaded_files_are_images_for_their_owner_only() -> None:
    async def scene(rig: Rig) -> None:
        keys = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        async with upload(rig.client, a_form(RED, {"purpose": "vision"}), keys[0]) as exchange:
            file = await exchange.json()
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

    rig = play(scene, Setting(decoder=ScriptedDecoder(), keys=("a=one", "b=two")))
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
def test_a_bad_image_is_refused_by_the_name_of_its_field(url: str) -> None:
    async def scene(rig: Rig) -> None:
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

    play(scene, Setting(decoder=ScriptedDecoder()))


def test_an_image_that_cannot_be_decoded_now_may_be_sent_again() -> None:
    async def scene(rig: Rig) -> None:
        error = await error_of(rig, CHAT, ask(image(LOST)), status=503)
        assert error["message"].startswith(
            "The image in 'messages[0].content[0].image_url' cannot be read now: "
        )

    play(scene, Setting(decoder=ScriptedDecoder()))


def test_images_are_counted_before_any_is_decoded() -> None:
    async def scene(rig: Rig) -> None:
        error = await error_of(rig, CHAT, ask(*[image(RED)] * 100))
        assert error["message"] == "A request may have at most 64 images, but got 100."
        assert error["param"] == "messages[0].content[64].image_url"
        assert not seen(rig)

    play(scene, Setting(decoder=ScriptedDecoder()))


def test_images_with_more_tokens_than_the_context_are_refused_as_they_are_counted() -> None:
    async def scene(rig: Rig) -> None:
        parts = [image(bytes([number])) for number in range(60)]
        error = await error_of(rig, CHAT, ask(*parts))
        assert error["code"] == "context_length_exceeded"
        assert len(seen(rig)) == 11

    play(scene, Setting(decoder=ScriptedDecoder(), context=30))


def test_only_users_and_tools_send_images_and_files_are_refused_by_name() -> None:
    async def scene(rig: Rig) -> None:
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

    play(scene, Setting(decoder=ScriptedDecoder()))


def test_a_model_that_reads_text_only_says_so() -> None:
    block = {"type": "image", "source": {"type": "url", "url": "https://x/y"}}
    turns = [{"role": "user", "content": [block]}]

    async def scene(rig: Rig) -> None:
        error = await error_of(rig, CHAT, ask(image(RED)))
        assert (error["code"], error["param"]) == (
            "unsupported_model",
            "messages[0].content[0].image_url",
        )
        assert error["message"].endswith("is an image, and this model reads text only.")
        for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
            error = await error_of(rig, path, {"model": MODEL, "max_tokens": 9, "messages": turns})
            assert error["message"].startswith("'messages[0].content[0].source' is an image")

    play(scene)


def test_a_template_without_images_is_named_instead_of_dropping_them() -> None:
    async def scene(rig: Rig) -> None:
        body = {**ask(image(RED)), "chat_template": "{% for m in messages %}x{% endfor %}"}
        error = await error_of(rig, CHAT, body)
        assert "template writes 0 of the 1 images" in error["message"]

    play(scene, Setting(step=0.001, decoder=ScriptedDecoder()), run=asyncio.run)


def test_another_prefix_domain_does_not_find_what_was_decoded() -> None:
    async def scene(rig: Rig) -> None:
        for key in ("one", "two", "one"):
            headers = {"authorization": f"Bearer {key}"}
            await answer_of(rig, CHAT, ask(image(RED)), headers)

    rig = play(scene, Setting(decoder=ScriptedDecoder(), keys=("a=one", "b=two")))
    assert len(seen(rig)) == 2
