import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.tokenizers import load_tokenizer
from engine.errors import StartupError
from gateway.ports import Tokenizer
from tests.adapters.tokenizers import families

Pair = tuple[Tokenizer, tokenizers.Tokenizer]


def unstripped() -> tokenizers.Tokenizer:
    """Gemma's decoder: like Llama 2's, but the leading space is kept."""
    tok = families.llama_2()
    tok.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    return tok


def never_prepending() -> tokenizers.Tokenizer:
    tok = families.unigram()
    tok.decoder = tokenizers.decoders.Metaspace(prepend_scheme="never")
    return tok


def bert() -> tokenizers.Tokenizer:
    """WordPiece; pieces inside a word begin with ##."""
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "##re", "cat", "##s", "a", "##b", "don", "'", "t"]
    vocab = {word: at for at, word in enumerate(words)}
    tok = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tok.add_special_tokens(["[CLS]", "[SEP]"])
    tok.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tok.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    return tok


FAMILIES = {
    "gpt_2": families.gpt_2,
    "llama_3": families.llama_3,
    "qwen_2": families.qwen_2,
    "llama_2": families.llama_2,
    "unstripped": unstripped,
    "unigram": families.unigram,
    "never_prepending": never_prepending,
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    tok = FAMILIES[request.param]()
    return load_tokenizer(families.saved(tok, tmp_path_factory.mktemp(request.param))), tok


def fed(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    decoder = tokenizer.decoder()
    return b"".join(decoder.feed(token_id) for token_id in ids)


def test_an_encoded_text_decodes_as_in_hugging_face(pair: Pair) -> None:
    ours, theirs = pair
    for text in families.PIECES:
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == theirs.encode(text).ids
        assert fed(ours, ids).decode() == theirs.decode(ids, skip_special_tokens=True)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_ids_decode_as_in_hugging_face(pair: Pair, data: st.DataObject) -> None:
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 5), max_size=20))
    joined = fed(ours, ids)
    try:
        text = joined.decode()
    except UnicodeDecodeError:
        if theirs.decoder.__class__.__name__ != "ByteLevel":
            return  # ByteFallback replaces whole runs; see adapters/tokenizers/decoding.py
        text = joined.decode("utf-8", "replace")
    assert text == theirs.decode(ids, skip_special_tokens=True)


def test_an_id_beyond_the_vocabulary_has_no_bytes(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.vocab_size == theirs.get_vocab_size()
    assert fed(ours, [ours.vocab_size, 10**9]) == ours.token_bytes(10**9) == b""


def test_added_tokens_that_are_not_special_have_bytes(tmp_path: Path) -> None:
    tok = families.qwen_2()
    ours = load_tokenizer(families.saved(tok, tmp_path))
    ids = ours.encode("a<tool_call>b<|im_end|>", add_special_tokens=False)
    assert fed(ours, ids) == b"a<tool_call>b"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"},
                {"type": "Fuse"},
            ],
        },
    ],
)
def test_the_error_for_an_unknown_decoder_names_it(tmp_path: Path, decoder: object) -> None:
    data = json.loads(families.gpt_2(300).to_str())
    data["decoder"] = decoder
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(StartupError, match=r"decoder .* is not supported"):
        load_tokenizer(tmp_path)


def test_token_bytes_are_those_within_a_text(pair: Pair) -> None:
    tokenizer, _ = pair
    before = tokenizer.encode("x", add_special_tokens=False)
    for text in families.PIECES:
        after = tokenizer.encode("x" + text, add_special_tokens=False)
        if after[: len(before)] != before:
            continue  # they merged
        ids = after[len(before) :]
        inside = fed(tokenizer, after)[len(fed(tokenizer, before)) :]
        shown = [i for i in ids if i not in tokenizer.special_ids]
        assert b"".join(map(tokenizer.token_bytes, shown)) == inside, text


def test_a_special_token_has_its_name_and_no_bytes_in_a_text(pair: Pair) -> None:
    ours, theirs = pair
    added = theirs.get_added_tokens_decoder()
    special = {number: token.content for number, token in added.items() if token.special}
    assert ours.special_tokens == {text: number for number, text in special.items()}
    assert ours.special_ids == special.keys()
    assert fed(ours, sorted(ours.special_ids)) == b""
    for token_id, text in special.items():
        assert ours.token_bytes(token_id) == text.encode()


def test_word_pieces_are_joined_and_words_are_separated_by_a_space(tmp_path: Path) -> None:
    tok = bert()
    tokenizer = load_tokenizer(families.saved(tok, tmp_path))
    ids = tokenizer.encode("the cats there a cat ab", add_special_tokens=True)
    assert fed(tokenizer, ids).decode() == tok.decode(ids) == "the cats there a cat ab"
    assert tokenizer.token_bytes(tokenizer.special_tokens["[SEP]"]) == b"[SEP]"
