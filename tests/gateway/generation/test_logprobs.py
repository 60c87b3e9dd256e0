from typing import Any

import pytest

from tests.gateway.rig import CHAT, TEXT, Rig, Setting, chat, played, text
from tests.gateway.scripted_model import END
from tests.gateway.serve.assembling import assembled


async def reply_to(rig: Rig, path: str, body: dict[str, Any]) -> Any:
    exchange = await rig.client.post(path, body)
    reply = exchange.json
    assert exchange.status == 200, reply
    return reply


async def chunks_of(rig: Rig, path: str, body: dict[str, Any]) -> list[Any]:
    *chunks, done = (await rig.client.post(path, {**body, "stream": True})).events
    assert done == "DONE"
    return chunks


def entry(data: bytes, *top: int) -> dict[str, Any]:
    """Chat's entry for a token of the rig, which is a byte."""
    (byte,) = data
    result = {"token": data.decode(), "logprob": -byte / 100, "bytes": [byte]}
    likeliest = [{"token": chr(other), "logprob": -other / 100, "bytes": [other]} for other in top]
    return {**result, "top_logprobs": likeliest}


@played(Setting(texts=("Hi",)))
async def test_chat_reports_each_token_with_its_top_logprobs(rig: Rig) -> None:
    body = chat(logprobs=True, top_logprobs=2)
    (choice,) = (await reply_to(rig, CHAT, body))["choices"]
    assert choice["logprobs"] == {
        "content": [entry(b"H", 72, 73), entry(b"i", 105, 106)],
        "refusal": None,
    }
    assert rig.ended[0].spec.logprobs == 2


@played(Setting(texts=("Hi",)))
async def test_chat_without_top_logprobs_reports_the_token_only(rig: Rig) -> None:
    (choice,) = (await reply_to(rig, CHAT, chat(logprobs=True)))["choices"]
    assert choice["logprobs"]["content"] == [entry(b"H"), entry(b"i")]


@played(Setting(texts=("Hi",)))
async def test_text_completions_report_tokens_in_columns(rig: Rig) -> None:
    (choice,) = (await reply_to(rig, TEXT, text(logprobs=2)))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["H", "i"],
        "token_logprobs": [-0.72, -1.05],
        "top_logprobs": [{"H": -0.72, "I": -0.73}, {"i": -1.05, "j": -1.06}],
        "text_offset": [0, 1],
    }
    (choice,) = (await reply_to(rig, TEXT, text(logprobs=0)))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"H": -0.72}, {"i": -1.05}]


@played(Setting(texts=("Hi",)))
async def test_echo_returns_the_prompt_first_with_logprobs(rig: Rig) -> None:
    reply = await reply_to(rig, TEXT, text(logprobs=1, echo=True))
    (choice,) = reply["choices"]
    assert choice["text"] == "abHi"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "H", "i"],
        "token_logprobs": [None, -0.98, -0.72, -1.05],
        "top_logprobs": [None, {"b": -0.98}, {"H": -0.72}, {"i": -1.05}],
        "text_offset": [0, 1, 2, 3],
    }
    assert reply["usage"]["prompt_tokens"] == 2
    assert reply["usage"]["completion_tokens"] == 3
    (choice,) = (await reply_to(rig, TEXT, text(echo=True)))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("abHi", None)


@played()
async def test_echo_with_max_tokens_zero_returns_the_prompt_only(rig: Rig) -> None:
    body = text(prompt="é!", logprobs=0, echo=True, max_tokens=0)
    reply = await reply_to(rig, TEXT, body)
    (choice,) = reply["choices"]
    assert choice["text"] == "é!"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.69, -0.33]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]
    assert reply["usage"]["completion_tokens"] == 0
    chunks = await chunks_of(rig, TEXT, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "é!"


@pytest.mark.parametrize("stop", [None, "lo", "o! a", "🙂"])
@pytest.mark.parametrize("shows_stop", [False, True])
@played(Setting(texts=("Hello! a🙂b", "Hello! a🙂b")))
async def test_streamed_tokens_match_their_text(
    rig: Rig, stop: str | None, shows_stop: bool
) -> None:
    fields = {"stop": stop, "include_stop_str_in_output": shows_stop, "n": 2, "seed": 3}
    body = chat(logprobs=True, top_logprobs=1, **fields)
    whole = (await reply_to(rig, CHAT, body))["choices"]
    chunks = await chunks_of(rig, CHAT, body)
    for index, choice in enumerate(whole):
        streamed = assembled(chunks, index)
        assert streamed["message"]["content"] == choice["message"]["content"]
        assert streamed["logprobs"] == choice["logprobs"]["content"]
        assert streamed["finish_reason"] == choice["finish_reason"]
    body = text(logprobs=1, echo=True, max_tokens=50, **fields)
    texts = (await reply_to(rig, TEXT, body))["choices"]
    pieces = [chunk["choices"][0] for chunk in await chunks_of(rig, TEXT, body)]
    for index, choice in enumerate(texts):
        said = [piece for piece in pieces if piece["index"] == index]
        assert "".join(piece["text"] for piece in said) == choice["text"]
        result = [piece["logprobs"] for piece in said if piece["logprobs"]]
        for column, values in choice["logprobs"].items():
            assert [value for part in result for value in part[column]] == values


@played()
async def test_tokens_of_a_cut_stop_string_are_not_reported(rig: Rig) -> None:
    (choice,) = (await reply_to(rig, TEXT, text(logprobs=0, stop="lo")))["choices"]
    assert choice["text"] == "Hel"
    assert choice["logprobs"]["tokens"] == ["H", "e", "l"]
    assert choice["stop_reason"] == "lo"
    body = text(logprobs=0, stop="lo", include_stop_str_in_output=True)
    (choice,) = (await reply_to(rig, TEXT, body))["choices"]
    assert choice["text"] == "Hello"
    assert choice["logprobs"]["tokens"] == [*"Hello"]


@played()
async def test_a_stop_token_can_be_included_and_is_the_stop_reason(rig: Rig) -> None:
    body = text(stop_token_ids=[ord("l")], return_token_ids=True, logprobs=0)
    (hidden,) = (await reply_to(rig, TEXT, body))["choices"]
    body["include_stop_str_in_output"] = True
    (shown,) = (await reply_to(rig, TEXT, body))["choices"]
    assert (hidden["text"], shown["text"]) == ("He", "Hel")
    assert hidden["stop_reason"] == shown["stop_reason"] == ord("l")
    assert hidden["token_ids"] == shown["token_ids"] == [*b"Hel"]
    assert hidden["logprobs"]["tokens"] == ["H", "e"]
    assert shown["logprobs"]["tokens"] == ["H", "e", "l"]


@played()
async def test_special_tokens_are_visible_if_requested(rig: Rig) -> None:
    fields = {"ignore_eos": True, "max_tokens": 7}
    (hidden,) = (await reply_to(rig, TEXT, text(**fields)))["choices"]
    (shown,) = (await reply_to(rig, TEXT, text(skip_special_tokens=False, **fields)))["choices"]
    assert (hidden["text"], shown["text"]) == ("Hello!", "Hello!<end>")


@played(Setting(texts=("Hi",)))
async def test_token_ids_include_the_end_token(rig: Rig) -> None:
    body = chat(return_token_ids=True)
    reply = await reply_to(rig, CHAT, body)
    assert reply["prompt_token_ids"] == [*b"user:hi\n"]
    assert reply["choices"][0]["token_ids"] == [*b"Hi", END]
    chunks = await chunks_of(rig, CHAT, body)
    assert chunks[0]["prompt_token_ids"] == [*b"user:hi\n"]
    result = [i for c in chunks for i in c["choices"][0].get("token_ids", ())]
    assert result == [*b"Hi", END]
    body = text(return_token_ids=True, prompt=["ab", "c"])
    first, second = (await reply_to(rig, TEXT, body))["choices"]
    assert (first["prompt_token_ids"], second["prompt_token_ids"]) == ([*b"ab"], [*b"c"])
    assert first["token_ids"] == [*b"Hi", END]


@played()
async def test_prompt_logprobs_have_vllms_shape(rig: Rig) -> None:
    reply = await reply_to(rig, TEXT, text(prompt_logprobs=2))
    assert reply["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -0.98, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -0.99, "rank": 2, "decoded_token": "c"},
        },
    ]
    reply = await reply_to(rig, CHAT, chat(prompt_logprobs=0))
    assert len(reply["prompt_logprobs"]) == len("user:hi\n")
    assert reply["prompt_logprobs"][1] == {
        "115": {"logprob": -1.15, "rank": 1, "decoded_token": "s"}
    }


@played()
async def test_a_long_prompt_has_logprobs(rig: Rig) -> None:
    reply = await reply_to(rig, TEXT, text(prompt="x" * 150, echo=True, logprobs=5))
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 150 + len("Hello!")


@played(Setting(texts=("zz", "    ", "AA")))
async def test_best_of_returns_the_most_likely_and_counts_all(rig: Rig) -> None:
    # The mean of the bytes decides, the end token's too: lower is likelier.
    body = text(best_of=3, n=2, seed=1)
    reply = await reply_to(rig, TEXT, body)
    assert [choice["text"] for choice in reply["choices"]] == ["    ", "AA"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in reply["choices"]] == [None, None]
    assert reply["usage"]["completion_tokens"] == 3 + 5 + 3
    assert reply["usage"]["prompt_tokens"] == 2


@played(Setting(texts=("z", "a", "A", "B")))
async def test_each_prompt_has_its_own_best(rig: Rig) -> None:
    reply = await reply_to(rig, TEXT, text(prompt=["ab", "c"], best_of=2, logprobs=0))
    assert [choice["text"] for choice in reply["choices"]] == ["a", "A"]
    assert [choice["logprobs"]["tokens"] for choice in reply["choices"]] == [["a"], ["A"]]


@played()
async def test_continuous_usage_stats_add_usage_to_every_chunk(rig: Rig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in ((CHAT, chat()), (TEXT, text())):
        chunks = await chunks_of(rig, path, {**body, "stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[-1], chunks[-1]["choices"]) == (7, [])
        assert set(range(1, 7)) <= set(counts)


@played(Setting(texts=("é",)))
async def test_tokens_of_partial_characters_are_shown_as_bytes(rig: Rig) -> None:
    (choice,) = (await reply_to(rig, CHAT, chat(logprobs=True)))["choices"]
    result = [(token["token"], token["bytes"]) for token in choice["logprobs"]["content"]]
    assert result == [("bytes:\\xc3", [0xC3]), ("bytes:\\xa9", [0xA9])]
