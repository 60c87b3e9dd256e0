from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.tokenizers import load_tokenizer
from adapters.tokenizers.definition import read_definition
from adapters.tokenizers.pre_tokens import PreTokenEncoder
from adapters.tokenizers.tiktoken_bpe import TiktokenTokenizer
from tests.adapters.tokenizers import families

FAMILIES = {"gpt_2": families.gpt_2, "llama_3": families.llama_3, "qwen_2": families.qwen_2}
Pair = tuple[TiktokenTokenizer, tokenizers.Tokenizer]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    theirs = FAMILIES[request.param]()
    ours = load_tokenizer(families.saved(theirs, tmp_path_factory.mktemp(request.param)))
    assert isinstance(ours, TiktokenTokenizer)
    return ours, theirs


texts = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(families.PIECES)), max_size=6)


@settings(deadline=None, max_examples=100)
@given(texts.map("".join), texts.map("".join))
def test_two_texts_have_hugging_faces_ids(pair: Pair, first: str, second: str) -> None:
    ours, theirs = pair
    expected = theirs.encode(first, second)
    types = expected.type_ids
    num_first = types.index(1) if 1 in types else len(types)
    assert ours.encode_pair(first, second) == (expected.ids, num_first)


def test_pre_tokens_need_no_vocabulary(tmp_path: Path) -> None:
    definition = read_definition(families.saved(families.qwen_2(), tmp_path))
    end = definition.special_tokens["<|im_end|>"]
    bare = replace(definition, text=b"", model={}, vocab={})
    seen: list[bytes] = []

    def encode(pre_token: bytes) -> list[int]:
        seen.append(pre_token)
        return [-1]

    encoder = PreTokenEncoder(bare, encode)
    assert encoder.encode("e\u0301t\u00e9 <|im_end|>12") == [-1, -1, end, -1, -1]
    assert seen == ["\u00e9t\u00e9".encode(), b" ", b"1", b"2"]


@pytest.mark.parametrize("part", ["नमस्ते दुनिया ", "e\u0301te\u0301 cafe\u0301. "])
def test_a_long_text_to_normalize_is_cut_into_many_pieces(pair: Pair, part: str) -> None:
    ours, theirs = pair
    found = [*ours.encode_pieces(part * 5_000, add_special_tokens=False)]
    assert max(map(len, found)) * 3 < sum(map(len, found))
    assert [*chain(*found)] == theirs.encode(part * 5_000, add_special_tokens=False).ids


@settings(deadline=None, max_examples=100)
@given(texts.map("".join))
def test_pre_tokens_have_hugging_faces_ids_however_long_they_are(pair: Pair, text: str) -> None:
    ours, theirs = pair
    expected = theirs.encode(text, add_special_tokens=False).ids
    for short in (0, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TiktokenTokenizer, "_suits_tiktoken", lambda *_: False)
            patch.setattr("adapters.tokenizers.tiktoken_bpe._SHORT_BYTES", short)
            assert ours.encode(text, add_special_tokens=False) == expected
