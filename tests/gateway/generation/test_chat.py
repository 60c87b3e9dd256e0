import asyncio

from engine.request import Abort
from gateway.schema.fields.sampling import SamplingDefaults
from tests.gateway.answers import answer_to
from tests.gateway.rig import CHAT, MODEL, STEP, TEXT, Rig, Setting, chat, play, played, text


def test_a_whole_response_has_openais_shape() -> None:
    answer = answer_to(CHAT, chat())
    reply = answer.json
    assert answer.status == 200
    assert reply["object"] == "chat.completion"
    assert reply["model"] == MODEL
    assert reply["created"] == 1_700_000_001
    assert reply["id"].startswith("chatcmpl-")
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Hello!",
                "refusal": None,
                "annotations": [],
            },
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt_tokens = len("user:hi\n")
    assert reply["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 7,
        "total_tokens": prompt_tokens + 7,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@played()
async def test_a_stream_opens_with_the_role_and_ends_with_the_reason_and_done(rig: Rig) -> None:
    *chunks, done = (await rig.client.post(CHAT, chat(stream=True))).events
    assert done == "DONE"
    assert chunks[0]["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
        "refusal": None,
    }
    assert [c["choices"][0]["delta"].get("content") for c in chunks[1:-1]] == list("Hello!")
    assert chunks[-1]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


@played()
async def test_every_iteration_is_one_write_as_it_ends(rig: Rig) -> None:
    async with rig.client.post(CHAT, chat(stream=True)) as exchange:
        timed = [(rig.service.clock(), chunk) async for chunk in exchange.chunks()]
    times, writes = zip(*timed, strict=True)
    assert times == tuple(STEP * n for n in range(1, len("Hello!") + 2))
    assert writes[0].count(b"data:") == 2
    assert writes[-1].endswith(b"data: [DONE]\n\n")


@played()
async def test_include_usage_adds_a_usage_chunk(rig: Rig) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    *chunks, usage, _ = (await rig.client.post(CHAT, body)).events
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 7,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@played(Setting(texts=("one", "three", "seven")))
async def test_several_choices_arrive_interleaved_and_each_ends_once(rig: Rig) -> None:
    *chunks, _ = (await rig.client.post(CHAT, chat(stream=True, n=3, seed=7))).events
    texts, ends = ["", "", ""], []
    order = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        order.append(choice["index"])
        if choice["finish_reason"]:
            ends.append((choice["index"], choice["finish_reason"]))
    assert texts == ["one", "three", "seven"]
    assert ends == [(0, "stop"), (1, "stop"), (2, "stop")]
    # The others begin when the first has computed the prompt, and then all take turns.
    assert list(dict.fromkeys(order)) == [0, 1, 2]
    assert order.index(2) < len(order) - 1 - order[::-1].index(0)
    seeds = [request.spec.sampling.seed for request in rig.ended]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3


@played(Setting(texts=("Hello! and much more",)))
async def test_a_stop_string_ends_the_request_and_is_cut_off(rig: Rig) -> None:
    body = chat(stream=True, stop=["lo!", "xyz"])
    *chunks, _ = (await rig.client.post(CHAT, body)).events
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hel"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    await asyncio.sleep(2 * STEP)
    (request,) = rig.ended
    assert request.outcome == "finished"
    assert request.abort is Abort.STOP_STRING
    assert request.produced == len("Hello!")


@played(Setting(texts=("é🙂",)))
async def test_a_character_split_over_tokens_arrives_whole(rig: Rig) -> None:
    *chunks, _ = (await rig.client.post(CHAT, chat(stream=True))).events
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "é", "🙂", None]


def test_ignore_eos_generates_up_to_max_tokens() -> None:
    reply = answer_to(CHAT, chat(ignore_eos=True, max_tokens=9)).json
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 9


@played()
async def test_without_max_tokens_the_output_may_fill_the_context(rig: Rig) -> None:
    await rig.client.post(CHAT, chat(max_completion_tokens=None))
    (request,) = rig.ended
    assert request.spec.max_tokens == 200 - 8


@played()
async def test_a_request_keeps_its_seed_or_gets_a_random_one(rig: Rig) -> None:
    for body in (chat(), chat(), chat(seed=-5)):
        await rig.client.post(CHAT, body)
    first, second, third = (request.spec.sampling.seed for request in rig.ended)
    assert first != second
    assert third == -5


@played()
async def test_sampling_fields_reach_the_engine(rig: Rig) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 3, "7": -100},
        "min_tokens": 2,
    }
    await rig.client.post(CHAT, chat(**fields))
    ask = rig.ended[0].spec
    assert (ask.sampling.temperature, ask.sampling.top_p, ask.sampling.top_k) == (0.5, 0.9, 5)
    assert (ask.sampling.min_p, ask.sampling.repetition_penalty) == (0.1, 1.1)
    assert (ask.sampling.presence_penalty, ask.sampling.frequency_penalty) == (1, -1)
    assert ask.sampling.logit_bias == ((5, 3), (7, -100))
    assert ask.min_tokens == 2


def test_llama_cpps_name_of_the_repetition_penalty_is_known() -> None:
    for path, body in ((CHAT, chat(repeat_penalty=1.3)), (TEXT, text(repeat_penalty=1.3))):
        (request,) = answer_to(path, body, DEFAULTS).rig.ended
        assert request.spec.sampling.repetition_penalty == 1.3
    both = chat(repeat_penalty=1.2, repetition_penalty=1.2)
    (request,) = answer_to(CHAT, both, DEFAULTS).rig.ended
    assert request.spec.sampling.repetition_penalty == 1.2


@played()
async def test_top_p_zero_is_greedy(rig: Rig) -> None:
    await rig.client.post(CHAT, chat(top_p=0))
    assert rig.ended[0].spec.sampling.temperature == 0.0


def test_the_models_defaults_of_sampling_are_used_unless_the_request_has_values() -> None:
    async def scene(rig: Rig) -> None:
        for path, body in ((CHAT, chat()), ("/v1/messages", chat(max_tokens=9)), (TEXT, text())):
            exchange = await rig.client.post(path, body)
            assert exchange.status in (0, 200), exchange.content
        await rig.client.post(CHAT, chat(temperature=1, top_p=1, top_k=0))
        body = (await rig.client.post("/v1/responses", {"model": MODEL, "input": "hi"})).json
        assert (body["temperature"], body["top_p"]) == (0.6, 0.9)

    *defaulted, given, _ = [r.spec.sampling for r in play(scene, DEFAULTS).ended]
    assert len(defaulted) == 3
    for sampling in defaulted:
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (given.temperature, given.top_p, given.top_k) == (1, 1, 0)
    assert (given.min_p, given.repetition_penalty) == (0.1, 1.1)


DEFAULTS = Setting(sampling_defaults=SamplingDefaults(0.6, 0.9, 20, 0.1, 1.1))
