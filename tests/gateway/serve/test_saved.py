"""Saved files: used for the same facts only, replaced as a whole, ignored if they are corrupt."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.serve.saved import SavedFile, load_time_file, model_facts
from gateway.settings.settings import load


def parse(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError("it must be a number")
    return value


def test_what_is_saved_is_used_by_the_next_start(tmp_path: Path) -> None:
    file = SavedFile.of({"model": "demo"}, "length", tmp_path)
    assert file.load(parse) is None
    file.save(60)
    assert SavedFile.of({"model": "demo"}, "length", tmp_path).load(parse) == 60
    assert [path.parent.name for path in tmp_path.glob("*/*")] == ["lengths"]


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
        assert file.load(parse) is None
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


def test_the_seconds_of_a_load_are_known_for_the_same_weights(tmp_path: Path) -> None:
    settings = load({"cache_dir": str(tmp_path), "model": "builtin"})
    load_time_file(settings).save(3.5)
    assert load_time_file(settings).load(float) == 3.5
    other = replace(settings, kernels=replace(settings.kernels, weights="int8"))
    assert load_time_file(other).load(float) is None
