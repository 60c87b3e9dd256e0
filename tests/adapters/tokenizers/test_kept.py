import os
from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.tokenizers import checks, kept, load_tokenizer, tiktoken_bpe
from adapters.tokenizers.byte_level import merge_table
from tests.adapters.tokenizers import families
from tests.adapters.tokenizers.test_byte_level import FAMILIES


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tokenizers are kept too, in several pieces."""
    monkeypatch.setattr(kept, "MIN_TOKENS", 0)
    monkeypatch.setattr(kept, "PIECE", 256)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each merge table that is made is an entry."""
    calls: list[str] = []

    def counted(*arguments: object) -> object:
        calls.append("made")
        return merge_table(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tiktoken_bpe, "merge_table", counted)
    return calls


@pytest.mark.parametrize("family", [*FAMILIES, "llama_2", "unigram"])
def test_a_kept_tokenizer_gives_the_same_ids_and_texts(
    family: str, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that tiktoken represents, and one of `tokenizers`."""
    make = FAMILIES.get(family) or getattr(families, family)
    directory = families.saved(make(), tmp_path)
    first = load_tokenizer(directory, tmp_path / "cache")
    assert len(made) == (family in FAMILIES)
    monkeypatch.delattr("adapters.tokenizers.loading.read_definition")
    second = load_tokenizer(directory, tmp_path / "cache")
    assert len(made) == (family in FAMILIES)
    for text in families.PIECES:
        ids = first.encode(text, add_special_tokens=True)
        assert second.encode(text, add_special_tokens=True) == ids
        assert [second.token_bytes(each) for each in ids] == [
            first.token_bytes(each) for each in ids
        ]
    assert second.vocab_size == first.vocab_size
    assert second.special_tokens == first.special_tokens


def test_a_kept_tokenizer_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.saved(families.qwen_2(), tmp_path)
    load_tokenizer(directory, tmp_path / "cache")
    monkeypatch.delattr(checks, "read_definition")
    checks.check_tokenizer(directory, tmp_path / "cache")
    os.utime(directory / "tokenizer.json", ns=(1, 1))
    with pytest.raises(NameError):
        checks.check_tokenizer(directory, tmp_path / "cache")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(bytes(99))],
    ids=["a bit", "empty", "zeros"],
)
def test_a_damaged_one_is_made_again(
    damage: Callable[[Path], None], made: list[str], tmp_path: Path
) -> None:
    directory = families.saved(families.qwen_2(), tmp_path)
    load_tokenizer(directory, tmp_path / "cache")
    (path,) = (tmp_path / "cache").iterdir()
    whole = path.read_bytes()
    damage(path)
    load_tokenizer(directory, tmp_path / "cache")
    assert path.read_bytes() == whole
    assert made == ["made", "made"]


def test_one_of_another_state_of_the_file_or_of_other_code_is_made_again(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.saved(families.qwen_2(), tmp_path)
    load_tokenizer(directory, tmp_path / "cache")
    os.utime(directory / "tokenizer.json", ns=(1, 1))
    load_tokenizer(directory, tmp_path / "cache")
    assert made == ["made", "made"]
    monkeypatch.setattr(kept, "source_digest", lambda *folders: "other")
    load_tokenizer(directory, tmp_path / "cache")
    assert made == ["made", "made", "made"]


def test_a_file_that_is_replaced_while_it_is_read_is_not_kept_for_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = families.saved(families.qwen_2(), tmp_path)

    def replaced(*arguments: object) -> object:
        families.saved(families.gpt_2(), tmp_path)
        return merge_table(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tiktoken_bpe, "merge_table", replaced)
    old = load_tokenizer(directory, tmp_path / "cache")
    monkeypatch.setattr(tiktoken_bpe, "merge_table", merge_table)
    new = load_tokenizer(directory, tmp_path / "cache")
    assert new.special_tokens != old.special_tokens


def test_a_folder_that_cannot_be_written_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    load_tokenizer(families.saved(families.qwen_2(), tmp_path), tmp_path / "cache")
    assert "cannot keep the tokenizer" in caplog.text
