import base64

from engine.media import Span
from gateway.images.reader import LOW_TOKENS, ImageLimits
from tests.gateway.forms import a_line, ended, started
from tests.gateway.images.requests import (
    BLUE,
    MESSAGES,
    RED,
    RESPONSES,
    answer_of,
    ask,
    data_url,
    error_of,
    ids,
    image,
    seen,
    text,
)
from tests.gateway.rig import CHAT, MODEL, Rig, Setting, chat, played
from tests.gateway.scripted_model import BAD, ScriptedDecoder


@played(Setting(decoder=ScriptedDecoder(), prefix_cache=False))
async def test_an_image_in_every_api_is_the_same_prompt_and_counts_in_usage(rig: Rig) -> None:
    anthropic = {
        "type": "image",
        "source": {
            "type": "base64",
            "media_type": "image/png",
            "data": base64.b64encode(RED).decode(),
        },
    }
    item = {"type": "input_image", "image_url": data_url(RED), "detail": "auto"}
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
    assert {request.spec.prompt for request in rig.ended} == {ids("user:a[", 3, "]b\n")}
    assert len({request.spec.spans for request in rig.ended}) == 1
    assert [data for data, _ in seen(rig)] == [RED], "it is kept after the first request"


@played(Setting(decoder=ScriptedDecoder(num_tiles=2)))
async def test_several_images_have_spans_of_their_own_and_share_no_prefix(rig: Rig) -> None:
    for second in (RED, BLUE):
        await answer_of(rig, CHAT, ask(image(RED), text("x"), image(second)))
    first, other = (request.spec for request in rig.ended)
    assert first.prompt == other.prompt == ids("user:[", 6, "]x[", 6, "]\n")
    assert [(s.start, s.length) for s in first.spans] == [(6, 3), (9, 3), (15, 3), (18, 3)]
    assert first.spans[0] == other.spans[0] == Span(6, 3, first.spans[1].digest)
    assert first.spans[2].digest != other.spans[2].digest
    assert rig.ended[1].num_cached == 15


@played(Setting(decoder=ScriptedDecoder()))
async def test_a_text_that_looks_like_a_placeholder_stays_text(rig: Rig) -> None:
    parts = [text("<ima"), text("ge> <row>"), image(RED), text("\ufdd0<im\ufdd0age>")]
    await answer_of(rig, CHAT, ask(*parts))
    await answer_of(rig, CHAT, ask(text("<image>")))
    with_image, without = (request.spec for request in rig.ended)
    assert with_image.prompt == ids("user:<image> <row>[", 3, "]<image>\n")
    assert without.prompt == ids("user:<image>\n")
    assert (len(with_image.spans), len(without.spans)) == (1, 0)


@played(Setting(decoder=ScriptedDecoder()))
async def test_tokens_that_stand_for_images_have_no_log_probabilities(rig: Rig) -> None:
    answer = await answer_of(rig, CHAT, {**ask(image(RED)), "prompt_logprobs": 0})
    has = [each is not None for each in answer["prompt_logprobs"]]
    assert has == [False] + 5 * [True] + 3 * [False] + 2 * [True]
    assert rig.ended[0].spec.prompt == ids("user:[", 3, "]\n")


@played(Setting(decoder=ScriptedDecoder(), image_limits=ImageLimits(max_tokens=900)))
async def test_detail_low_has_fewer_tokens(rig: Rig) -> None:
    for detail in ("low", "high", "auto", "original"):
        await answer_of(rig, CHAT, ask(image(RED, detail=detail)))
    error = await error_of(rig, CHAT, ask(image(RED, detail="tiny")))
    assert error["param"] == "messages[0].content[0].image_url.detail"
    assert seen(rig) == [(RED, LOW_TOKENS), (RED, 900)]


@played(Setting(decoder=ScriptedDecoder()))
async def test_results_of_tools_may_have_images(rig: Rig) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()}
    result = [{"type": "text", "text": "shot"}, {"type": "image", "source": source}]
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
    prompts = [request.spec.prompt for request in rig.ended]
    assert prompts[0] == ids("user:go\nassistant:\ntool:shot[", 3, "]\nuser:so?\n")
    assert prompts[1] == ids("user:go\nassistant:\ntool:shot[", 3, "]\n")


@played(Setting(decoder=ScriptedDecoder()))
async def test_a_response_that_continues_another_one_has_its_images(rig: Rig) -> None:
    item = {"type": "input_image", "image_url": data_url(RED)}
    body = {"model": MODEL, "input": [{"role": "user", "content": [item]}]}
    first = await answer_of(rig, RESPONSES, body)
    again = {"model": MODEL, "input": "more", "previous_response_id": first["id"]}
    await answer_of(rig, RESPONSES, again)
    items = (await rig.client.get(f"{RESPONSES}/{first['id']}/input_items")).json["data"]
    assert items[0]["content"][0] == {**item, "file_id": None, "detail": "auto"}
    spans = [request.spec.spans for request in rig.ended]
    assert spans[0] == spans[1] != ()


@played(Setting(decoder=ScriptedDecoder(), context=24))
async def test_the_oldest_images_are_left_out_where_the_context_is_full(rig: Rig) -> None:
    turns = [
        {"role": "user", "content": [{"type": "input_image", "image_url": data_url(data)}]}
        for data in (RED, BLUE)
    ]
    body = {"model": MODEL, "input": turns, "truncation": "auto", "max_output_tokens": 10}
    await answer_of(rig, RESPONSES, body)
    assert rig.ended[0].spec.prompt == ids("user:[", 3, "]\n")
    assert sorted(data for data, _ in seen(rig)) == [BLUE, RED]


@played(Setting(decoder=ScriptedDecoder(), prefix_cache=False))
async def test_a_cut_never_divides_an_image(rig: Rig) -> None:
    for keep in (9, 6, 5, 4):
        body = {**ask(image(RED), text("abc")), "truncate_prompt_tokens": keep}
        await answer_of(rig, CHAT, body)
    whole, *others = [request.spec for request in rig.ended]
    assert (whole.prompt, [s.start for s in whole.spans]) == (ids("[", 3, "]abc\n"), [1])
    assert {spec.prompt for spec in others[:2]} == {ids("]abc\n")}
    assert others[2].prompt == ids("abc\n")
    assert not any(spec.spans for spec in others)


@played(Setting(decoder=ScriptedDecoder()))
async def test_breakpoints_are_counted_with_the_images_before_them(rig: Rig) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    first = [text("a"), image(RED), {**text("b"), **mark}, image(BLUE), {**text("c"), **mark}]
    turns = [{"role": "user", "content": first}, {"role": "user", "content": "d"}]
    body = chat(messages=turns, prompt_cache_options={"mode": "explicit"})
    await answer_of(rig, CHAT, body)
    await answer_of(rig, CHAT, ask(*first))
    ends = [len(ids(*pieces)) for pieces in (("user:a[", 3, "]b"), ("user:a[", 3, "]b[", 3, "]c"))]
    assert rig.ended[0].spec.prompt == ids("user:a[", 3, "]b[", 3, "]c\nuser:d\n")
    assert rig.ended[0].spec.caching.checkpoints[:2] == tuple(ends)  # others are behind the images
    assert rig.ended[1].num_cached == ends[1]


@played(Setting(decoder=ScriptedDecoder()))
async def test_a_batch_has_images(rig: Rig) -> None:
    body = ask(image(RED))
    batch_id = await started(rig, a_line("one", body) + b"\n" + a_line("two", ask(image(BAD))))
    batch = await ended(rig, batch_id)
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert rig.ended[0].spec.prompt == ids("user:[", 3, "]\n")
