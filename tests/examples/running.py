"""How the tests run an example: as a program, with the repository's root as working directory."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What the command prints on stdout; it must exit with 0."""
    ended = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def run_script(name: str, *arguments: str | Path) -> str:
    """What a numbered script prints."""
    return run(sys.executable, EXAMPLES / name, *arguments)


def run_module(name: str, *arguments: str | Path) -> str:
    """What a module below `examples` prints when Python runs it with -m."""
    return run(sys.executable, "-m", f"examples.{name}", *arguments)
