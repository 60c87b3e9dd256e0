"""The console script `podway`: checks that Python imports our packages, then runs the command.

`engine` and `adapters` are common names; PyPI has an `adapters` too. Nothing else of Podway is
imported before the check.
"""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = {"engine": "request.py", "adapters": "builtin"}  # name -> a part that only ours has


def main() -> None:
    """Exit with 1 and one line if a package of another project hides one of ours."""
    for name, part in OURS.items():
        if reason := hidden(name, part):
            sys.stderr.write(f"podway: {reason}\n")
            sys.exit(1)
    importlib.import_module("gateway.__main__").main()


def hidden(name: str, part: str) -> str | None:
    """Why the package that Python would import under this name is not ours; None if it is."""
    spec = find_spec(name)
    origin = Path(spec.origin) if spec and spec.origin else None
    if origin and origin.parents[1] == ROOT and (origin.parent / part).exists():
        is_docstring_only = b"import " not in origin.read_bytes()  # as ours are
        if is_docstring_only:
            return None
    where = f"the package {name!r} in {origin.parent}" if origin else f"no package {name!r} here"
    return (
        f"{where} is not Podway's. Another project installs a package of that name: "
        "install Podway into a virtual environment of its own"
    )
