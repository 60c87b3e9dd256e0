import json
import random
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

import adapters
from adapters.tokenizers import load_tokenizer
from adapters.tokenizers.byte_level import TokenBytes, byte_alphabet, merge_table
from adapters.tokenizers.definition import NotRepresentable
from adapters.tokenizers.huggingface import HuggingFaceTokenizer
from adapters.tokenizers.patterns import BYTE_LEVEL_PATTERN
from adapters.tokenizers.pieces import PIECE_CHARS, may_be_cut, pieces, places
from adapters.tokenizers.tiktoken_bpe import TiktokenTokenizer
from gateway.ports import Tokenizer
from tests.adapters.tokenizers import families

Pair = tuple[Tokenizer, tokenizers.Tokenizer]


def padded() -> tokenizers.Tokenizer:
    """Special tokens first, then tokens that no merge produces but tiktoken would."""
    tok = families.byte_level(families.LLAMA_3, 600, ["<|endoftext|>", "<|im_start|>"])
    vocab = dict(json.loads(tok.to_str())["model"]["vocab"])
    tokens = [token for token in vocab if len(token) > 1 and not token.startswith("<|")]
    for number in range(300):
        filler = random.Random(number).choice(tokens) + "ab1"[number % 3]
        vocab.setdefault(filler, len(vocab))
    return families.edited(tok, vocab=vocab)


def shuffled() -> tokenizers.Tokenizer:
    """Ids in random order."""
    tok = families.qwen_2()
    data = json.loads(tok.to_str())
    ids = list(range(len(data["model"]["vocab"])))
    random.Random(1).shuffle(ids)
    vocab = dict(zip(data["model"]["vocab"], ids, strict=True))
    return families.edited(tok, vocab=vocab)


def built_in() -> tokenizers.Tokenizer:
    """The tokenizer of the built-in model."""
    path = Path(adapters.__file__).parent / "builtin" / "tokenizer.json"
    return tokenizers.Tokenizer.from_file(str(path))


FAMILIES = {
    "built_in": built_in,
    "gpt_2": families.gpt_2,
    "llama_3": families.llama_3,
    "qwen_2": families.qwen_2,
    "padded": padded,
    "shuffled": shuffled,
}


# "padded" and "shuffled" cut texts by the expressions of two others.
EACH_EXPRESSION = pytest.mark.parametrize(
    "pair", ["built_in", "gpt_2", "llama_3", "qwen_2"], indirect=True
)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    tok = FAMILIES[request.param]()
    return load_tokenizer(families.saved(tok, tmp_path_factory.mktemp(request.param))), tok


def same(pair: Pair, text: str, specials: Sequence[bool] = (False, True)) -> None:
    ours, theirs = pair
    for special in specials:
        expected = theirs.encode(text, add_special_tokens=special).ids
        assert ours.encode(text, add_special_tokens=special) == expected


def test_ids_equal_hugging_faces(pair: Pair) -> None:
    for text in families.PIECES:
        same(pair, text)


@EACH_EXPRESSION
def test_ids_equal_hugging_faces_for_all_kinds_of_characters(pair: Pair) -> None:
    codes = [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    step = 6 * 1024  # in order, so that adjacent ones are of one kind; every seventh suffices
    for start in range(0, len(codes), step * 7):
        same(pair, " ".join(map(chr, codes[start : start + step])), [False])
    same(pair, "a".join(map(chr, codes[:0x3000])), [False])


@settings(deadline=None, max_examples=75)
@given(st.lists(st.one_of(st.text(max_size=12), st.sampled_from(families.PIECES)), max_size=8))
def test_ids_equal_hugging_faces_for_any_text(pair: Pair, parts: list[str]) -> None:
    same(pair, "".join(parts))


@pytest.mark.parametrize(
    "run",
    ["a", "{", " ", "\n", "\t", "1", "\u00e9", "中", " \n", "' ", "\u2003", "e\u0301", "\u0301"],
)
@EACH_EXPRESSION
def test_a_long_run_of_one_kind_gives_the_same_ids_without_overflow(pair: Pair, run: str) -> None:
    same(pair, run * (20_000 // len(run)), [False])


def test_a_megabyte_of_whitespace_does_not_overflow(tmp_path: Path) -> None:
    tok = families.gpt_2()
    same((load_tokenizer(families.saved(tok, tmp_path)), tok), "x" + " " * 1_000_000 + "y", [False])


@settings(deadline=None, max_examples=75)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=12),
            st.sampled_from(families.PIECES),
            st.sampled_from([" ", "  ", "a ", " b", "'s", "\n", "\x1c", "\u2003", "1 2", "., "]),
            st.sampled_from(["a1", "1a", "a'", "e\u0301", "1234", "a_", "_(", "it's1", "。", "中"]),
        ),
        max_size=12,
    )
)
def test_a_text_cut_wherever_it_may_be_has_the_same_ids(pair: Pair, parts: list[str]) -> None:
    text, ours = "".join(parts), pair[0]
    assert isinstance(ours, TiktokenTokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adapters.tokenizers.pieces.PIECE_CHARS", 1)
        for special in (False, True):
            found = ours.encode_pieces(text, add_special_tokens=special)
            assert [*chain(*found)] == ours.encode(text, add_special_tokens=special)


def test_a_long_text_is_cut_into_many_pieces(pair: Pair) -> None:
    assert isinstance(pair[0], TiktokenTokenizer)
    for part in ("ab cd. ", "aGVsbG8gd29ybGQ4", "f(x){y=z;}"):
        found = [*pair[0].encode_pieces(part * 50_000, add_special_tokens=False)]
        assert max(map(len, found)) * 20 < sum(map(len, found))


def test_texts_without_spaces_are_cut_but_never_within_an_added_token() -> None:
    code, chinese = "ab1|" * 20_000, "日本語，" * 20_000
    assert max(map(len, pieces(code + chinese, places(())))) < PIECE_CHARS + 4
    where = places(["<|im|>", "b1"])
    assert list(pieces(code, where)) == [code]
    assert {piece[0] for piece in [*pieces(chinese, where)][1:]} == {"，"}


@pytest.mark.parametrize(
    ("pattern", "may"),
    [
        (families.QWEN_2, True),
        (families.LLAMA_3, True),
        (BYTE_LEVEL_PATTERN, True),
        (families.QWEN_2 + r"|\p{L}+ \p{L}+", False),
        (r"[^\n]+|\n", False),
    ],
)
def test_texts_are_cut_only_under_known_expressions(pattern: str, may: bool) -> None:
    assert may_be_cut(pattern) == may


def test_a_lone_surrogate_is_an_error(pair: Pair) -> None:
    with pytest.raises(UnicodeEncodeError):
        pair[0].encode("a\ud800b", add_special_tokens=False)


def test_two_threads_can_encode_at_once(pair: Pair) -> None:
    text = "".join(families.PIECES) * 10
    expected = pair[1].encode(text, add_special_tokens=False).ids
    results: list[list[int]] = []

    def encode() -> None:
        results.append(pair[0].encode(text, add_special_tokens=False))

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


@pytest.fixture(scope="module")
def bytes_only() -> tokenizers.Tokenizer:
    return families.byte_level(families.QWEN_2, 256)


CHARS = "abc"
MERGES = st.lists(
    st.tuples(st.text(CHARS, min_size=1, max_size=3), st.text(CHARS, min_size=1, max_size=3)),
    max_size=8,
    unique=True,
)


@settings(deadline=None, max_examples=30)
@given(merges=MERGES, looks_up=st.booleans(), words=st.lists(st.text(CHARS, max_size=12)))
def test_any_list_of_merges_gives_hugging_faces_ids_or_is_rejected(
    bytes_only: tokenizers.Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    merges: list[tuple[str, str]],
    looks_up: bool,
    words: list[str],
) -> None:
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    for left, right in merges:
        for token in (left, right, left + right):
            vocab.setdefault(token, len(vocab))
    pairs = [list(merge) for merge in merges]
    tok = families.edited(bytes_only, vocab=vocab, merges=pairs, ignore_merges=looks_up)
    directory = families.saved(tok, tmp_path_factory.getbasetemp() / "merges")
    same((load_tokenizer(directory), tok), " ".join(words))


def test_a_merge_that_only_tiktoken_would_make_is_detected(tmp_path: Path) -> None:
    # "abc" ends in a + bc, which is not in the list: tiktoken merges it, Hugging Face does not.
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    vocab |= {"bc": 256, "ab": 257, "abc": 258}
    merges = [["b", "c"], ["a", "b"], ["ab", "c"]]
    with pytest.raises(NotRepresentable, match="tiktoken would merge 'abc'"):
        merge_table({"merges": merges}, vocab, [])
    tok = families.edited(families.byte_level(families.QWEN_2, 256), vocab=vocab, merges=merges)
    ours = load_tokenizer(families.saved(tok, tmp_path))
    assert isinstance(ours, HuggingFaceTokenizer)
    assert ours.encode("abc", add_special_tokens=False) == [vocab["a"], 256]


def test_a_token_that_no_merge_produces_has_no_rank() -> None:
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    vocab |= {"bc": 256, "cd": 257, "ab": 258, "abcd": 259}
    merges = ["b c", "c d", "a b", "ab cd"]
    assert b"abcd" not in merge_table({"merges": merges}, vocab, []).ranks
    assert b"abcd" in merge_table({"merges": merges, "ignore_merges": True}, vocab, []).ranks


def test_the_byte_alphabet_equals_the_librarys() -> None:
    alphabet = byte_alphabet()
    assert set(alphabet) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
    read = TokenBytes()
    assert all(read.strict(char) == bytes([byte]) for char, byte in alphabet.items())
    assert read.strict("a b") is None
    assert read.loose("a｜b") == "a｜b".encode()
