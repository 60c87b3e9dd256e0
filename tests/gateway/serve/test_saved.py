"""Saved files: used for the same facts only, replaced as a whole, ignored if they are corrupt."""

import logging
from pathlib import Path

import pytest

from engine.policy.estimates.lengths import LearnedLengths
from gateway.serve.assemble import _save_if_learned
from gateway.serve.saved import SavedFile, model_facts
from tests.scheduling import learned_lengths


def test_learned_lengths_are_used_by_the_next_start(tmp_path: Path) -> None:
    file = SavedFile.of({"model": "demo"}, "length", tmp_path)
    assert file.load(LearnedLengths.parse) is None
    known = learned_lengths([3] * 60)
    _save_if_learned(file, known, 0)
    again = SavedFile.of({"model": "demo"}, "length", tmp_path).load(LearnedLengths.parse)
    assert again is not None
    assert (again.num_observed, again.quantile(0.5)) == (60, 3)
    assert [path.parent.name for path in tmp_path.glob("*/*")] == ["lengths"]


def test_nothing_is_saved_if_no_output_was_observed(tmp_path: Path) -> None:
    file = SavedFile.of({"model": "demo"}, "length", tmp_path)
    _save_if_learned(file, learned_lengths([3] * 60), 60)
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_was_changed_on_the_disk_is_ignored_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = SavedFile.of({"model": "demo"}, "value", tmp_path)
    file.save({"seconds": 0.25})
    assert file.load(dict) == {"seconds": 0.25}
    file.path.write_text(file.path.read_text().replace("0.25", "250.0"))
    assert file.load(dict) is None
    assert "it is damaged" in caplog.text


def test_files_that_a_killed_server_was_writing_are_removed_by_the_next_one(tmp_path: Path) -> None:
    file = SavedFile.of({"model": "demo"}, "value", tmp_path)
    file.path.parent.mkdir()
    (file.path.parent / "left.new").write_text("{")
    file.save(1)
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


@pytest.mark.parametrize("content", ["", "[]", '{"facts": {"model": "demo"}, "length": {}}'])
def test_a_corrupt_file_is_ignored_with_a_warning(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = SavedFile.of({"model": "demo"}, "length", tmp_path)
    file.path.parent.mkdir()
    file.path.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert file.load(LearnedLengths.parse) is None
    (record,) = caplog.records
    assert str(file.path) in record.getMessage()


def test_a_checkpoint_is_identified_by_its_config_and_the_sizes_of_its_weights(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"123")
    before = model_facts(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    after = model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert before != after != model_facts(tmp_path)
