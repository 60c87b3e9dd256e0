import subprocess
import sys
from pathlib import Path

import pytest

from gateway.console import OURS, ROOT, hidden


@pytest.mark.parametrize("name", OURS)
def test_our_own_packages_are_accepted(name: str) -> None:
    assert hidden(name, OURS[name]) is None


@pytest.mark.parametrize("name", OURS)
def test_a_foreign_package_is_reported_in_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("import json\n")
    program = "from gateway.console import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"podway: the package '{name}' in {tmp_path / name} is not Podway's.")
    assert line.endswith("install Podway into a virtual environment of its own")


def test_files_of_another_package_over_ours_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapters" / "builtin").mkdir(parents=True)
    (tmp_path / "adapters" / "__init__.py").write_text("import transformers\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("gateway.console.ROOT", tmp_path)
    monkeypatch.delitem(sys.modules, "adapters", raising=False)
    assert hidden("adapters", "builtin") is not None
