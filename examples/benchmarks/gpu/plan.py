"""The stages: kernel builds, the worker alone on random weights, tests, the server over HTTP."""

import importlib.util
import json
import os
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

# The tests that need a GPU; collecting all tests would need every client library.
GPU_TESTS = (
    *("tests/gpu", "tests/adapters/attention", "tests/engine/worker/test_roofline.py"),
    "tests/contracts/test_features.py",
)
MAX_TEST_PROCESSES = 12  # most of their time is imports, compilers and the oracle on the CPU
SIZES = "1,8,32,64,128,256"
FP8 = ("--weights", "fp8", "--kv-cache-dtype", "fp8")
PODWAY = (sys.executable, "-m", "gateway")


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """A benchmark of a worker without server."""

    shape: str
    batch_sizes: str
    context: int
    prompts: str
    seconds: float  # for the whole stage
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages in the size of a GPU, or of a rehearsal on the CPU."""

    device: str
    tests: tuple[str, ...]
    alone: tuple[WorkerRun, ...]
    served: str
    streams: int
    output_tokens: int
    http_seconds: float
    folder: Path  # for results of runs, and the machine's limits, which are measured once
    attention: str = "auto"
    kernels: Path | None = None  # where built kernels are copied to

    @classmethod
    def of(
        cls, device: str, folder: Path, *, has_flashinfer: bool = True, kernels: Path | None = None
    ) -> "Plan":
        """The plan for this device; without FlashInfer attention is plain torch."""
        if device == "cpu":
            rehearsal = ("tests/gpu", "-m", "not gpu")
            small = WorkerRun("TINY", "1,4", 64, "2x32", 240.0)
            return cls(device, rehearsal, (small,), "TINY", 8, 8, 240.0, folder)
        alone = (
            WorkerRun("Llama-3.1-8B", SIZES, 1024, "8x2048", 180.0),
            WorkerRun("Llama-3.1-8B", SIZES, 1024, "8x2048", 90.0, FP8),
            WorkerRun("Llama-3.1-8B", "1,8,64,256", 1024, "8x2048", 80.0, ("--weights", "int4")),
            WorkerRun("Qwen3.5-4B", "1,64", 1024, "8x2048", 80.0),
            WorkerRun("Qwen3-30B-A3B", "1,64", 1024, "8x2048", 120.0),
            WorkerRun("gpt-oss-20b", "1,64", 1024, "8x2048", 120.0),
            WorkerRun("DeepSeek-V2-Lite", "1,64", 1024, "8x2048", 100.0),
            WorkerRun("Qwen2.5-0.5B", "1,64,256", 1024, "8x2048", 50.0),
            WorkerRun("Qwen2.5-7B", "1,64", 1024, "8x2048", 80.0),
        )
        tests = (*GPU_TESTS, "-m", "gpu")
        attention = "auto" if has_flashinfer else "reference"
        return cls(device, tests, alone, "Llama-3.1-8B", 256, 96, 150.0, folder, attention, kernels)

    def stages(self) -> list[Stage]:
        """All stages in the order in which they run, the most important first."""
        alone = [
            Stage(
                " ".join((f"alone: {one.shape}", *one.flags)),
                one.seconds,
                partial(run_alone, self, one),
            )
            for one in self.alone
        ]
        build, kernels = [], []
        if self.device != "cpu":
            build = [Stage("Triton kernels", 90.0, verify_triton_kernels)]
            kernels = [Stage("products", 60.0, partial(time_kernels, self, "products"))]
            if self.attention == "auto":
                build.append(Stage("kernels", 300.0, partial(build_kernels, self)))
                kernels.append(Stage("decodes", 60.0, partial(time_kernels, self, "decodes")))
        return [
            *build,
            Stage("tests", 240.0, partial(run_tests, self.tests)),
            *kernels,
            *alone[:2],
            Stage("mixed steps", 60.0 + 0.5 * self.http_seconds, partial(run_mixed, self)),
            Stage("unequal lengths", 60.0, partial(run_unequal, self)),
            Stage("server over HTTP", self.http_seconds, partial(run_server, self)),
            *alone[2:],
        ]


def build_kernels(plan: Plan, seconds: float) -> dict[str, Any]:
    """Build FlashInfer's modules side by side: seconds by module, and those that are left if time
    runs out."""
    path = plan.folder / "kernels.json"
    flags = ["--json", str(path)]
    if plan.kernels:
        flags += ["--copy-to", str(plan.kernels)]
    run = [sys.executable, "-m", "examples.benchmarks.gpu.kernels", *flags]
    try:
        command(run, seconds, shows=True)
    except StageFailed as failure:
        raise StageFailed(str(failure), _read(path)) from failure
    return _read(path)


def _read(path: Path) -> dict[str, Any]:
    """The figures in a file; none if there is no file."""
    found: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    return found


def verify_triton_kernels(seconds: float) -> dict[str, Any]:
    """The Triton kernels that compute the same as torch on this GPU, and those that do not."""
    module = "examples.benchmarks.gpu.triton_kernels"
    found: dict[str, Any] = json.loads(
        command([sys.executable, "-m", module], seconds).splitlines()[-1]
    )
    return found


def time_kernels(plan: Plan, name: str, seconds: float) -> dict[str, Any]:
    """Microseconds of our kernels beside those of libraries, by a program of this folder."""
    path = plan.folder / f"{name}.json"
    module = f"examples.benchmarks.gpu.{name}"
    command([sys.executable, "-m", module, "--json", str(path)], seconds)
    return _read(path)


def run_alone(plan: Plan, one: WorkerRun, seconds: float) -> dict[str, Any]:
    """The figures of `podway bench --offline`; those measured so far if time runs out."""
    path, limits = plan.folder / "alone.json", plan.folder / "limits.json"
    flags = ["--offline", one.shape, "--device", plan.device, "--batch-sizes", one.batch_sizes]
    flags += ["--context", str(one.context), "--prompt-lengths", one.prompts]
    flags += ["--attention", plan.attention, *one.flags]
    flags += ["--seconds", "0.2" if plan.device == "cpu" else "2", "--json", str(path)]
    flags += ["--in-flight", "2"]
    if limits.exists():
        flags += ["--limits", str(limits)]
    path.unlink(missing_ok=True)
    try:
        command([*PODWAY, "bench", *flags], seconds)
    except StageFailed as failure:
        raise StageFailed(str(failure), _read(path)) from failure
    if not limits.exists():
        limits.write_bytes(path.read_bytes())
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def run_mixed(plan: Plan, seconds: float) -> dict[str, Any]:
    """Steps of decodes and pieces of prompts, in CUDA graphs and eagerly."""
    flags = ["--shape", plan.served, "--device", plan.device, "--attention", plan.attention]
    if plan.device == "cpu":
        flags += ["--cases", "4", "3+5", "--seconds", "0.1"]
    run = [sys.executable, "-m", "examples.benchmarks.gpu.mixed_steps", *flags]
    found: dict[str, Any] = json.loads(command(run, seconds).splitlines()[-1])
    return found


def run_unequal(plan: Plan, seconds: float) -> dict[str, Any]:
    """Decodes of which one has a much longer context, with and without dividing its keys."""
    flags = ["--shape", plan.served, "--device", plan.device, "--attention", plan.attention]
    if plan.device == "cpu":
        flags += ["--cases", "3x8+32", "--seconds", "0.1"]
    run = [sys.executable, "-m", "examples.benchmarks.gpu.unequal", *flags]
    found: dict[str, Any] = json.loads(command(run, seconds).splitlines()[-1])
    return found


def run_tests(words: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run tests side by side: counts, the first line of each failure, and numbers they record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        run = [sys.executable, "-m", "pytest", "-q", *words, "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist"):
            count = min(MAX_TEST_PROCESSES, os.cpu_count() or 1)
            run += ["-p", "no:benchmark", "-n", str(count)]
        output = ""
        try:
            command([*run, f"--junitxml={path}", "-o", "junit_family=xunit1"], seconds)
        except StageFailed as failure:
            output = str(failure)
        if not path.exists():
            raise StageFailed(output or "pytest wrote no results")
        figures = read_results(path)
    if output:
        raise StageFailed(output, figures)
    if not figures["passed"]:
        raise StageFailed("all tests were skipped", figures)
    return figures


def read_results(path: Path) -> dict[str, Any]:
    """Counts, failures and recorded numbers in pytest's JUnit file."""
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
    numbers = {
        str(case.get("name")): {each.get("name"): each.get("value") for each in recorded}
        for case in cases
        if (recorded := list(case.iter("property")))
    }
    passed = len(cases) - len(bad) - skipped
    return {"passed": passed, "skipped": skipped, "failed": lines, "numbers": numbers}


def run_server(plan: Plan, seconds: float) -> dict[str, Any]:
    """Concurrent streams over HTTP, and the worker alone at that batch size and mean context.

    The server is as busy as the worker alone if a stream's mean time per output token is the
    worker's step time. Events are not counted: one event may carry several tokens.
    """
    until = time.monotonic() + seconds
    prompt = 64 if plan.device != "cpu" else 16
    load = over_http(plan, prompt, lambda: until - time.monotonic())
    context = prompt + plan.output_tokens // 2
    one = WorkerRun(plan.served, str(plan.streams), context, str(prompt), 0.0)
    alone = run_alone(plan, one, until - time.monotonic())
    pace, gap = alone["rows"][0]["pace_seconds"], load["quantiles"]["tpot"][50]
    return {
        "streams": plan.streams,
        "output_tokens_per_second": load["output_tokens_per_second"],
        "failed": load["num_failed"],
        "seconds_per_output_token": gap,
        "worker_pace_seconds": pace,
        "as_busy_as_the_worker_alone": pace / max(gap, pace),
    }


def over_http(plan: Plan, prompt: int, left: Callable[[], float]) -> dict[str, Any]:
    """The report of `podway bench` about `podway serve`."""
    most = str(plan.streams)
    flags = ["--device", plan.device, "--attention", plan.attention]
    flags += ["--max-batch-size", most, "--max-batch-tokens", "2048"]
    flags += ["--kv-slots", str(plan.streams * (prompt + plan.output_tokens + 16))]
    flags += ["--port", "0", "--store", "memory", "--log-level", "error"]
    with tempfile.TemporaryDirectory() as folder:
        path, output = Path(folder) / "load.json", Path(folder) / "server.txt"
        serve = [*PODWAY, "serve", f"random:{plan.served}", *flags]
        with output.open("w") as file, started(serve, file) as server:
            url = None
            while url is None:
                if server.poll() is not None or left() < 1:
                    with output.open() as log:
                        raise StageFailed(f"the server did not start\n{tail(log)}")
                time.sleep(0.2)
                url = re.search(r" at (http://\S+)", output.read_text())
            load = ["-c", most, "-n", str(2 * plan.streams), "--prompt-tokens", str(prompt)]
            load += ["--output-tokens", str(plan.output_tokens), "--json", str(path)]
            command([*PODWAY, "bench", url[1], *load], left())
            found: dict[str, Any] = json.loads(path.read_bytes())
    return found
