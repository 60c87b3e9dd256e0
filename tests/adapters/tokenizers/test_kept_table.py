"""Merge tables on disk: read instead of made, and made again when the file cannot be trusted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from adapters.tokenizers import byte_level, kept_table
from adapters.tokenizers.definition import TokenizerDefinition, read_definition
from adapters.tokenizers.kept_table import kept_merge_table
from tests.adapters.tokenizers import families
from tests.adapters.tokenizers.test_byte_level import shuffled


@pytest.fixture
def definition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenizerDefinition:
    monkeypatch.setattr(kept_table, "MIN_TOKENS", 0)
    return read_definition(families.saved(shuffled(), tmp_path))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A call of `merge_table` is an entry."""
    calls: list[str] = []

    def counted(*arguments: object) -> byte_level.MergeTable:
        calls.append("made")
        return byte_level.merge_table(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(kept_table, "merge_table", counted)
    return calls


def test_a_table_is_made_once(
    definition: TokenizerDefinition, made: list[str], tmp_path: Path
) -> None:
    first = kept_merge_table(definition, tmp_path / "cache")
    assert kept_merge_table(definition, tmp_path / "cache") == first
    assert made == ["made"]
    assert first.ids is not None, "ids and ranks of the shuffled vocabulary differ"


def flip(kept: Path) -> None:
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [flip, lambda kept: kept.write_bytes(b""), lambda kept: kept.write_bytes(b"\0" * 99)]
)
def test_a_damaged_table_is_made_again(
    damage: Callable[[Path], None],
    definition: TokenizerDefinition,
    made: list[str],
    tmp_path: Path,
) -> None:
    first = kept_merge_table(definition, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    whole = kept.read_bytes()
    damage(kept)
    assert kept_merge_table(definition, tmp_path / "cache") == first
    assert kept.read_bytes() == whole
    assert made == ["made", "made"]


def test_a_table_of_other_code_is_made_again(
    definition: TokenizerDefinition,
    made: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept_merge_table(definition, tmp_path / "cache")
    (tmp_path / "other.py").write_text("another proof")
    monkeypatch.setattr(byte_level, "__file__", str(tmp_path / "other.py"))
    kept_merge_table(definition, tmp_path / "cache")
    assert made == ["made", "made"]


def test_a_folder_that_cannot_be_written_only_warns(
    definition: TokenizerDefinition, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("not a folder")
    assert kept_merge_table(definition, tmp_path / "cache").ranks
    assert "cannot keep the ranks" in caplog.text
