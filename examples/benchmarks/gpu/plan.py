"""What is run: tests, the worker alone on random weights, and the whole server over HTTP."""

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from examples.benchmarks.gpu.stages import Stage, StageFailed, command, started, tail

PODWAY = (sys.executable, "-m", "gateway")


@dataclass(frozen=True, slots=True)
class Alone:
    """A run of the worker alone."""

    shape: str
    batch_sizes: str
    context: int
    prompts: str
    seconds: float  # for the whole stage


@dataclass(frozen=True, slots=True)
class Plan:
    """The same stages in the size of a GPU, or of a rehearsal on the CPU."""

    device: str
    tests: tuple[str, ...]
    alone: tuple[Alone, ...]
    served: str
    streams: int
    output_tokens: int
    http_seconds: float
    folder: Path  # for what runs write, among it the limits, which are measured once

    @classmethod
    def of(cls, device: str, folder: Path) -> "Plan":
        """For this device."""
        if device == "cpu":
            rehearsal = ("tests/gpu", "-m", "not gpu", "-k", "together")
            small = Alone("TINY", "1,4", 64, "2x32", 240.0)
            return cls(device, rehearsal, (small,), "TINY", 8, 8, 240.0, folder)
        alone = (
            Alone("Llama-3.1-8B", "64", 1024, "8x2048", 110.0),
            Alone("Qwen2.5-0.5B", "1,64,256", 1024, "8x2048", 50.0),
            Alone("Qwen2.5-7B", "1,64", 1024, "8x2048", 80.0),
        )
        tests = ("tests", "-m", "gpu")
        return cls(device, tests, alone, "Llama-3.1-8B", 256, 96, 150.0, folder)

    def stages(self) -> list[Stage]:
        """All of them, in the order in which they run; what matters most comes first."""
        alone = [
            Stage(f"alone: {one.shape}", one.seconds, partial(run_alone, self, one))
            for one in self.alone
        ]
        return [
            alone[0],
            Stage("tests", 150.0, partial(run_tests, self.tests)),
            Stage("server over HTTP", self.http_seconds, partial(run_server, self)),
            *alone[1:],
        ]


def run_alone(plan: Plan, one: Alone, seconds: float) -> dict[str, Any]:
    """The figures of `podway bench --offline`."""
    path, limits = plan.folder / "alone.json", plan.folder / "limits.json"
    flags = ["--offline", one.shape, "--device", plan.device, "--batch-sizes", one.batch_sizes]
    flags += ["--context", str(one.context), "--prompt-lengths", one.prompts]
    flags += ["--seconds", "0.2" if plan.device == "cpu" else "2", "--json", str(path)]
    if limits.exists():
        flags += ["--limits", str(limits)]
    command([*PODWAY, "bench", *flags], seconds)
    if not limits.exists():
        limits.write_bytes(path.read_bytes())
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def run_tests(words: Sequence[str], seconds: float) -> dict[str, Any]:
    """Counts, and the first line of each failure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        run = [sys.executable, "-m", "pytest", "-q", *words, f"--junitxml={path}"]
        said = ""
        try:
            command([*run, "-p", "no:cacheprovider"], seconds)
        except StageFailed as failure:
            said = str(failure)
        if not path.exists():
            raise StageFailed(said or "pytest wrote no results")
        figures = read_results(path)
    if said:
        raise StageFailed(said, figures)
    if not figures["passed"]:
        raise StageFailed("all tests were skipped", figures)
    return figures


def read_results(path: Path) -> dict[str, Any]:
    """Of pytest's JUnit file."""
    cases = list(ElementTree.parse(path).iter("testcase"))
    bad = [
        (case, found)
        for case in cases
        for kind in ("failure", "error")
        if (found := case.find(kind)) is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    lines = {
        f"{case.get('classname')}::{case.get('name')}": (found.get("message") or "")[:300]
        for case, found in bad
    }
    return {"passed": len(cases) - len(bad) - skipped, "skipped": skipped, "failed": lines}


def run_server(plan: Plan, seconds: float) -> dict[str, Any]:
    """So many streams at once over HTTP, and the worker alone at that batch and mean context.

    As busy as the worker alone is a server between whose tokens no more time passes than between
    the worker's steps.
    """
    until = time.monotonic() + seconds
    prompt = 64 if plan.device != "cpu" else 16
    load = over_http(plan, prompt, lambda: until - time.monotonic())
    context = prompt + plan.output_tokens // 2
    one = Alone(plan.served, str(plan.streams), context, str(prompt), 0.0)
    alone = run_alone(plan, one, until - time.monotonic())
    pace, gap = alone["rows"][0]["pace_seconds"], load["quantiles"]["itl"][50]
    return {
        "streams": plan.streams,
        "output_tokens_per_second": load["output_tokens_per_second"],
        "failed": load["num_failed"],
        "token_gap_seconds": gap,
        "worker_pace_seconds": pace,
        "as_busy_as_the_worker_alone": pace / max(gap, pace),
    }


def over_http(plan: Plan, prompt: int, left: Callable[[], float]) -> dict[str, Any]:
    """What `podway bench` says of `podway serve`."""
    most = str(plan.streams)
    flags = ["--device", plan.device, "--max-batch-size", most, "--max-batch-tokens", "2048"]
    flags += ["--kv-slots", str(plan.streams * (prompt + plan.output_tokens + 16))]
    flags += ["--port", "0", "--store", "memory", "--cost-model", "none", "--log-level", "error"]
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "load.json", Path(folder) / "server.txt"
        serve = [*PODWAY, "serve", f"random:{plan.served}", *flags]
        with output.open("w") as file, started(serve, file) as server:
            url = None
            while url is None:
                if server.poll() is not None or left() < 1:
                    with output.open() as said:
                        raise StageFailed(f"the server did not start\n{tail(said)}")
                time.sleep(0.2)
                url = re.search(r" at (http://\S+)", output.read_text())
            load = ["-c", most, "-n", str(2 * plan.streams), "--prompt-tokens", str(prompt)]
            load += ["--output-tokens", str(plan.output_tokens), "--json", str(path)]
            command([*PODWAY, "bench", url[1], *load], left())
            found: dict[str, Any] = json.loads(path.read_bytes())
    return found
