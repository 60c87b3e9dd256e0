"""How the tests run an example: in a process of its own, or in this one to import torch once."""

import io
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MAX_SECONDS = 600.0  # an example that waits for ever fails its test


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What the command prints on stdout; it must exit with 0."""
    ended = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=MAX_SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def run_script(name: str, *arguments: str | Path) -> str:
    """What a numbered script prints."""
    return run(sys.executable, EXAMPLES / name, *arguments)


def run_module(name: str, *arguments: str | Path) -> str:
    """What a module below `examples` prints when Python runs it with -m."""
    return run(sys.executable, "-m", f"examples.{name}", *arguments)


def run_here(name: str, *arguments: str | Path) -> str:
    """The same as `run_script` or `run_module`, in this process; it must not exit with an error."""
    printed = io.StringIO()
    with patch.object(sys, "argv", [name, *map(str, arguments)]), redirect_stdout(printed):
        if name.endswith(".py"):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        else:
            sys.modules.pop(f"examples.{name}", None)  # runpy warns if another test has imported it
            runpy.run_module(f"examples.{name}", run_name="__main__", alter_sys=True)
    return printed.getvalue()
