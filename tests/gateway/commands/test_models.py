import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.commands import models


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint, one of an unknown architecture, a GGUF file and other files."""
    monkeypatch.setattr(models, "hub_models", lambda: iter(()))
    for name, architecture in (("good", "LlamaForCausalLM"), ("bad", "MysteryForCausalLM")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (folder / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "empty").mkdir()
    (tmp_path / "tiny.gguf").write_bytes(bytes(10))
    return tmp_path


def test_checkpoints_and_files_are_listed_with_what_can_be_served(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.main(["--json", str(machine)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    listed = {Path(line["name"]).name: line for line in lines}
    assert set(listed) == {"good", "bad", "tiny.gguf"}
    assert (listed["good"]["num_bytes"], listed["good"]["is_supported"]) == (1000, True)
    assert listed["bad"]["is_supported"] is False


def test_the_table_has_the_builtin_model_too(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models.main([str(machine)]) == 0
    shown = capsys.readouterr().out
    assert "builtin" in shown
    assert "not supported" in shown


def test_what_cannot_be_read_is_left_out(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine / "bad" / "model.safetensors").unlink()
    (machine / "bad" / "model.safetensors").symlink_to(machine / "removed")
    (machine / "lost+found").mkdir()
    iterdir = Path.iterdir

    def denied(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", denied)
    assert models.main(["--json", str(machine)]) == 0
    names = [Path(json.loads(line)["name"]).name for line in capsys.readouterr().out.splitlines()]
    assert sorted(names) == ["good", "tiny.gguf"]


def test_a_directory_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["/no/such/place"]) == 1
    assert "/no/such/place" in capsys.readouterr().err
