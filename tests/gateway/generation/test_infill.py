import re
from typing import Any

import pytest

from gateway.generation.infill import Infill, OtherFile
from tests.gateway.rig import TEXT, Rig, Setting, play, played, text
from tests.gateway.scripted_model import ByteTokenizer

MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>")
PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = range(1, 6)


class FimTokenizer(ByteTokenizer):
    """Bytes, but StarCoder's marks are the ids from 1 on."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        for part in re.split(f"({'|'.join(MARKS)})", text):
            ids += [MARKS.index(part) + 1] if part in MARKS else part.encode()
        return ids


CODER = Setting(tokenizer=FimTokenizer())
INFILL = {"input_prefix": "a(", "input_suffix": ")b", "n_predict": 4}


async def posted(rig: Rig, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    exchange = await rig.client.post(path, body)
    return exchange.status, exchange.json


@played(CODER)
async def test_a_suffix_goes_behind_the_prompt_and_the_output_between_them(rig: Rig) -> None:
    for prompt in ("a(", [97]):
        status, reply = await posted(rig, TEXT, text(prompt=prompt, suffix=")b"))
        assert (status, reply["choices"][0]["text"]) == (200, "Hello!")
    assert [request.spec.prompt for request in rig.ended] == [
        (PREFIX, *b"a(", SUFFIX, *b")b", MIDDLE),
        (PREFIX, 97, SUFFIX, *b")b", MIDDLE),
    ]
    assert all(FILE in request.spec.end_ids for request in rig.ended)


@pytest.mark.parametrize(
    ("setting", "path", "body", "param"),
    [
        (Setting(), TEXT, text(suffix="x"), "suffix"),
        (CODER, TEXT, text(suffix="x", echo=True), "echo"),
        (Setting(), "/infill", INFILL, "input_suffix"),
        (CODER, "/infill", INFILL | {"n_predict": 0}, "n_predict"),
        (CODER, "/infill", {"input_prefix": "a"}, "input_suffix"),
        (CODER, "/infill", INFILL | {"input_extra": [{"text": ""}] * 257}, "input_extra"),
        (CODER, "/infill", INFILL | {"input_suffix": "x" * 5000}, "input_suffix"),
    ],
)
def test_what_cannot_be_filled_in_is_refused_by_name(
    setting: Setting, path: str, body: dict[str, Any], param: str
) -> None:
    async def scene(rig: Rig) -> None:
        status, reply = await posted(rig, path, body)
        assert (status, reply["error"]["param"]) == (400, param)

    play(scene, setting)


@played(CODER)
async def test_infill_has_llama_cpps_shape(rig: Rig) -> None:
    extra = [{"filename": "x.py", "text": "y"}]
    status, reply = await posted(rig, "/infill", INFILL | {"input_extra": extra, "prompt": "c"})
    (request,) = rig.ended
    assert request.spec.prompt == (
        *(REPOSITORY, *b"repository\n", FILE, *b"x.py\ny\n", FILE, *b"file\n"),
        *(PREFIX, *b"a(c", SUFFIX, *b")b", MIDDLE),
    )
    assert status == 200
    assert (reply["content"], reply["stop"], reply["stop_type"]) == ("Hell", True, "limit")
    assert reply["tokens_predicted"] == reply["timings"]["predicted_n"] == 4


@played(CODER)
async def test_an_infill_streams_its_text_and_then_its_counts(rig: Rig) -> None:
    body = INFILL | {"stream": True, "n_predict": -1, "cache_prompt": True, "samplers": []}
    events = (await rig.client.post("/infill", body)).events
    assert "".join(event["content"] for event in events) == "Hello!"
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["stop_type"] == "eos"


def test_a_model_without_marks_between_files_gets_their_texts() -> None:
    infill = Infill.of(FimTokenizer())
    assert infill is not None
    plain = infill._replace(marks=infill.marks._replace(file=""))
    assert plain.context([OtherFile("a", "b")]) == "a\nb\n"
    assert plain.context([]) == infill.context([]) == ""
