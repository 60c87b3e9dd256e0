import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.tokenizers import load_tokenizer
from adapters.tokenizers.definition import NotRepresentable
from adapters.tokenizers.huggingface import HuggingFaceTokenizer
from adapters.tokenizers.patterns import BYTE_LEVEL_PATTERN, split_pattern
from engine.errors import StartupError
from tests.adapters.tokenizers import families


def byte_level(*, add_prefix_space: bool = False, use_regex: bool = False) -> dict[str, Any]:
    flags = {"add_prefix_space": add_prefix_space, "use_regex": use_regex}
    return {"type": "ByteLevel", "trim_offsets": True, **flags}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": parts}


def split_by(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}}
    return sequence(split | {"behavior": "Isolated", "invert": False}, byte_level())


def added(**flags: bool) -> dict[str, Any]:
    token = {"id": 700, "content": "<mask>", "special": True, "normalized": False}
    return {
        "added_tokens": [token | {"lstrip": False, "rstrip": False, "single_word": False} | flags]
    }


NOT_FOR_TIKTOKEN: dict[str, dict[str, Any]] = {
    "prefix space": {"pre_tokenizer": byte_level(add_prefix_space=True, use_regex=True)},
    "no cutting": {"pre_tokenizer": byte_level()},
    "two cuts": {
        "pre_tokenizer": sequence(
            {"type": "Digits", "individual_digits": True}, byte_level(use_regex=True)
        )
    },
    "lowercase": {"normalizer": {"type": "Lowercase"}},
    "lstrip": added(lstrip=True),
    "single word": added(single_word=True),
    "composed and normalized": {"normalizer": {"type": "NFC"}, **added(normalized=True)},
    "one begins another": {
        "added_tokens": [
            {**added()["added_tokens"][0], "id": 700 + n, "content": "<a>" + "b" * n}
            for n in range(3)
        ]
    },
    "bert": {"post_processor": {"type": "BertProcessing", "sep": ["b", 1], "cls": ["a", 2]}},
}


@pytest.mark.parametrize("change", NOT_FOR_TIKTOKEN)
def test_what_tiktoken_cannot_represent_goes_to_hugging_face(tmp_path: Path, change: str) -> None:
    data = json.loads(families.byte_level(families.LLAMA_3, 700).to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps(data | NOT_FOR_TIKTOKEN[change]))
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, HuggingFaceTokenizer)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*families.PIECES, "a <mask> b<a>bb<a>bc x<mask>y A1b22"]:
        for special in (False, True):
            expected = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == expected


@pytest.mark.parametrize("family", [families.llama_2, families.unigram])
@settings(deadline=None, max_examples=60)
@given(text=st.text())
def test_sentencepiece_goes_to_hugging_face(
    tmp_path_factory: pytest.TempPathFactory, family: Any, text: str
) -> None:
    directory = tmp_path_factory.getbasetemp() / family.__name__
    if not directory.exists():
        families.saved(family(), directory)
    ours = load_tokenizer(directory)
    assert isinstance(ours, HuggingFaceTokenizer)
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    long = text + " and more" * 300  # longer than the limit of the short call
    for each in (text, long):
        assert ours.encode(each, add_special_tokens=True) == theirs.encode(each).ids


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    tok = families.llama_2()
    tok.enable_truncation(4)
    tok.enable_padding(length=64)
    ours = load_tokenizer(families.saved(tok, tmp_path))
    tok.no_truncation()
    tok.no_padding()
    text = "a longer text than four tokens"
    assert ours.encode(text, add_special_tokens=True) == tok.encode(text).ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no tokenizer.json"),
        ("{", "cannot be read"),
        ("[]", "is not a tokenizer.json"),
        ('{"model": {"type": "BPE"}}', "is not a tokenizer.json"),
        (
            '{"model": {"type": "Wonder", "vocab": {}}, "decoder": {"type": "ByteLevel"}}',
            "cannot be loaded",
        ),
    ],
)
def test_an_invalid_file_fails_with_a_readable_message(
    tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StartupError, match=message):
        load_tokenizer(tmp_path)


def test_known_expressions_are_accepted_unchanged() -> None:
    assert split_pattern(split_by(families.LLAMA_3)) == families.LLAMA_3
    assert split_pattern({"type": "ByteLevel", "add_prefix_space": False}) == BYTE_LEVEL_PATTERN


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}+|\p{N}+|\s+",  # drops punctuation
        r"[^\r\n\p{L}]+|\p{L}+|[\r]+",  # drops line feeds
        r"(?=a)b|[\s\S]+",  # look-ahead
        r"(a)\1|[\s\S]",  # back-reference
        r"\p{L}++|\P{L}+",  # possessive in one, greedy in the other
        r"\h+|\H+",  # hexadecimal in one, whitespace in the other
        r"[a-z&&b]|[\s\S]",
        r"[\s\S",
    ],
)
def test_ambiguous_expressions_are_rejected(pattern: str) -> None:
    with pytest.raises(NotRepresentable, match="expression"):
        split_pattern(split_by(pattern))
