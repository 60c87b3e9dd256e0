import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from adapters.dialects import load_chat_template
from adapters.models.checkpoint import end_token_ids
from adapters.tokenizers import load_token_table, load_tokenizer
from engine.errors import StartupError
from tests.adapters.tokenizers import families
from tests.models.gguf_files import Gguf

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


def pieces_of(tok: tokenizers.Tokenizer) -> dict[str, Any]:
    """The metadata of a SentencePiece vocabulary, with scores in the order of the merges."""
    data = json.loads(tok.to_str())
    vocab = sorted(data["model"]["vocab"].items(), key=lambda each: each[1])
    places = {
        "".join(merge if isinstance(merge, list) else merge.split(" ")): -float(place)
        for place, merge in reversed(list(enumerate(data["model"]["merges"], 1)))
    }
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    is_byte = [token.startswith("<0x") and len(token) == 6 for token, _ in vocab]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [
            6 if byte else kinds.get(token, 1)
            for (token, _), byte in zip(vocab, is_byte, strict=True)
        ],
        "tokenizer.ggml.scores": [places.get(token, -1e6) for token, _ in vocab],
        "tokenizer.ggml.bos_token_id": data["model"]["vocab"]["<s>"],
        "tokenizer.ggml.eos_token_id": data["model"]["vocab"]["</s>"],
        "tokenizer.ggml.unknown_token_id": data["model"]["vocab"]["<unk>"],
    }


def written(folder: Path, tok: tokenizers.Tokenizer | None = None, **fields: Any) -> Path:
    """A file with the tokenizer."""
    path = folder / "model.gguf"
    Gguf("llama", tokenizer=tok, **fields).write(path)
    return path


def same(path: Path, tok: tokenizers.Tokenizer) -> None:
    ours = load_tokenizer(path)
    for text in families.PIECES:
        for special in (False, True):
            ids = tok.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids, (text, special)
        decoder = ours.decoder()
        shown = b"".join(map(decoder.feed, ids)).decode(errors="replace")
        assert shown == tok.decode(ids), text
    assert len(load_token_table(path).tokens) == ours.vocab_size


@pytest.mark.parametrize(
    ("make", "pre", "bos"),
    [
        (families.gpt_2, "gpt-2", None),
        (families.qwen_2, "qwen2", None),
        (families.qwen_3_5, "qwen35", None),
        (families.llama_3, "llama-bpe", "<|begin_of_text|>"),
        (families.tekken, "tekken", "<|begin_of_text|>"),
    ],
)
def test_byte_level_vocabularies_give_the_same_ids(
    tmp_path: Path, make: Any, pre: str, bos: str | None
) -> None:
    tok = make()
    more = {} if bos is None else {"tokenizer.ggml.bos_token_id": tok.token_to_id(bos)}
    same(written(tmp_path, tok, pre=pre, more=more), tok)


def test_a_sentencepiece_vocabulary_gives_the_same_ids(tmp_path: Path) -> None:
    tok = families.llama_2()
    same(written(tmp_path, more=pieces_of(tok)), tok)


def test_a_vocabulary_of_gemma_4_has_its_merges(tmp_path: Path) -> None:
    """Spaces are ▁ as in a SentencePiece vocabulary, and none is prepended."""
    tok = families.llama_2()
    data = json.loads(tok.to_str())
    data["normalizer"]["normalizers"] = data["normalizer"]["normalizers"][1:]
    data["decoder"]["decoders"] = data["decoder"]["decoders"][:3]
    merges = [each if isinstance(each, str) else " ".join(each) for each in data["model"]["merges"]]
    more = pieces_of(tok) | {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.scores": [-1000.0] * len(data["model"]["vocab"]),
        "tokenizer.ggml.add_space_prefix": False,
    }
    same(written(tmp_path, more=more), tokenizers.Tokenizer.from_str(json.dumps(data)))


def test_end_tokens_and_chat_template_are_read(tmp_path: Path) -> None:
    tok = families.llama_3()
    ids = {name: tok.token_to_id(f"<|{name}|>") for name in ("begin_of_text", "end_of_text")}
    more = {
        "tokenizer.ggml.bos_token_id": ids["begin_of_text"],
        "tokenizer.ggml.eos_token_id": ids["end_of_text"],
        "tokenizer.chat_template": TEMPLATE,
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    path = written(tmp_path, tok, more=more)
    others = [tok.token_to_id(name) for name in ("<|eot_id|>", "<|im_end|>")]
    assert end_token_ids(path) == (ids["end_of_text"], *others)
    template = load_chat_template(path)
    assert template is not None
    assert template.source.startswith(TEMPLATE)
    assert "<|begin_of_text|>hi<|end_of_text|>" in template.render(
        [{"role": "user", "content": "hi"}]
    )


def test_chats_of_a_file_without_a_template_are_chatml_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = load_chat_template(written(tmp_path, families.llama_3()))
    assert template is not None
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert template.render(chat) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    (record,) = caplog.records
    assert "has no chat template" in record.getMessage()


def test_the_file_determines_whether_bos_is_added(tmp_path: Path) -> None:
    tok = families.llama_3()
    more = {
        "tokenizer.ggml.bos_token_id": tok.token_to_id("<|begin_of_text|>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    ids = tok.encode("hello", add_special_tokens=False).ids
    ours = load_tokenizer(written(tmp_path, tok, more=more))
    assert ours.encode("hello", add_special_tokens=True) == ids


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab' is not a pair"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token_type is not as long"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokens is .* expected a list of strings"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 10**6},
            "bos_token_id=1000000 is outside the vocabulary",
        ),
    ],
)
def test_the_error_names_the_unsupported_key(
    tmp_path: Path, more: dict[str, Any], named: str
) -> None:
    path = written(tmp_path, families.llama_3(), more=more)
    with pytest.raises(StartupError, match=named):
        load_tokenizer(path)
