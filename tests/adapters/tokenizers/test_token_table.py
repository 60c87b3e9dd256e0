from pathlib import Path

import pytest

import adapters
from adapters.tokenizers import load_token_table, load_tokenizer
from tests.adapters.tokenizers import families
from tests.adapters.tokenizers.test_decoding import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_every_id_has_its_bytes(family: str, tmp_path: Path) -> None:
    directory = families.saved(FAMILIES[family](), tmp_path)
    table, tokenizer = load_token_table(directory), load_tokenizer(directory)
    assert len(table.tokens) == tokenizer.vocab_size
    start = tokenizer.encode("xx xx", add_special_tokens=False)
    for token_id, expected in enumerate(table.tokens):
        decoder = tokenizer.decoder()
        for before in start:
            decoder.feed(before)
        assert decoder.feed(token_id) == expected
    assert set(table.special.values()) == tokenizer.special_ids


def test_texts_are_encoded_without_control_tokens() -> None:
    table = load_token_table(Path(adapters.__file__).parent / "builtin")
    assert b"".join(table.tokens[i] for i in table.encode("Héllo {")) == "Héllo {".encode()
