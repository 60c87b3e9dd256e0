import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import pytest

from engine.errors import StartupError
from gateway.commands.bench import command as bench
from gateway.commands.offline_bench import command, report
from gateway.commands.offline_bench.roofline import Limit

LIMITS = {"read": Limit(1e10, "a"), "float32": Limit(1e11, "b"), "int8": Limit(4e11, "c")}


class KnownReads(report.Ruler):
    """Reads 10 GB/s, a millisecond late, and every other time two."""

    num_reads = 0

    async def limits(self) -> Mapping[str, Limit]:
        return LIMITS

    async def read(self, num_bytes: int) -> float:
        self.num_reads += 1
        return num_bytes / 1e10 + 1e-3 * (1 + self.num_reads % 2)

    async def __aenter__(self) -> Self:
        return self


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def _known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def known(device: str, threads: int) -> Mapping[str, Limit]:
        assert device == "cpu"
        return LIMITS

    monkeypatch.setattr(command, "measure_limits", known)
    monkeypatch.setattr(command, "Ruler", KnownReads)


@pytest.mark.usefixtures("_known_limits")
def test_every_step_is_compared_with_its_lower_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "run.json"
    flags = ["--batch-sizes", "1,3", "--context", "140", "--prompt-lengths", "20,2x33"]
    few = ["--seconds", "0.01", "--threads", "1", "--weights", "int8"]
    few += ["--kv-cache-dtype", "int8"]
    code = bench.main(["--offline", "TINY", *flags, *few, "--json", str(figures)])
    assert code == 0
    written = json.loads(figures.read_bytes())
    kinds = [(row["kind"], row["num_requests"], row["context"]) for row in written["rows"]]
    assert kinds == [("decode", 1, 140), ("decode", 3, 140), ("prefill", 1, 20), ("prefill", 2, 33)]
    for row in written["rows"]:
        floor = max(row["floor_read_seconds"], row["floor_compute_seconds"])
        assert row["floor_read_seconds"] == pytest.approx(row["num_bytes"] / 1e10 + 1e-3, abs=1e-9)
        assert row["fraction"] == pytest.approx(floor / row["fastest_seconds"])
        assert 0 < row["fastest_seconds"] <= row["worker_seconds"]
        assert row["pace_seconds"] > 0
    assert written["worker"]["weights"].startswith("int8")
    assert written["worker"]["kv_dtype"] == "int8"
    assert written["worker"]["num_blocks"] == 3 * 9
    shown = capsys.readouterr().out
    assert "TINY: 4 M parameters" in shown
    assert "10.0 GB/s read, at best (a)" in shown
    assert shown.count("decode") == 2


def test_two_steps_may_be_in_flight_with_limits_of_an_earlier_run(tmp_path: Path) -> None:
    figures, known = tmp_path / "run.json", tmp_path / "known.json"
    limits = {name: limit._asdict() for name, limit in LIMITS.items()}
    known.write_text(json.dumps({"limits": limits}))
    flags = ["--batch-sizes", "2", "--context", "16", "--prompt-lengths", "8"]
    few = ["--seconds", "0.01", "--threads", "1", "--in-flight", "2"]
    few += ["--limits", str(known), "--weights", "float32"]
    assert bench.main(["--offline=TINY", *flags, *few, "--json", str(figures)]) == 0
    written = json.loads(figures.read_bytes())
    assert written["in_flight"] == 2
    assert written["worker"]["weights"].startswith("float32")
    assert written["worker"]["kv_dtype"] == "float16"
    assert written["limits"] == limits
    for row in written["rows"]:
        floor = max(row["floor_read_seconds"], row["floor_compute_seconds"])
        assert row["fraction"] == pytest.approx(floor / row["pace_seconds"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--offline", "Llama-9"], "unknown shape 'Llama-9'; known: Llama-3.1-8B, "),
        (["--offline", "M110", "--context", "4097"], "need 4097 positions, but M110 has 4096"),
        (["--offline", "TINY", "--batch-sizes", "1000000000"], "are available"),
    ],
)
def test_a_load_that_cannot_run_is_rejected_with_its_reason(flags: list[str], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        bench.main(flags)


@pytest.mark.parametrize(
    ("flag", "value"), [("--prompt-lengths", "8x"), ("--batch-sizes", "0"), ("--context", "-1")]
)
def test_invalid_numbers_are_rejected(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--offline", "TINY", flag, value])
    assert ended.value.code == 1
    assert flag in capsys.readouterr().err


def use_python(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Run a program of this text instead of modules."""
    (folder / "python").write_text(f"#!{sys.executable}\n{text}")
    (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


IN_LITTLE_TIME = """
import sys

from engine.worker import roofline
from engine.worker.cpu import limits

limits.CHUNK_BYTES, limits.READ_BYTES, limits.WINDOW_BYTES = 64 << 10, 4 << 20, 1 << 20
limits.PEAK_ITERATIONS = 100
assert sys.argv[1:4] == ["-P", "-m", "engine.worker.roofline"]
del sys.argv[1:4]
roofline.main()
"""


async def test_the_bytes_of_a_step_are_read_by_a_process_that_has_measured_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_python(tmp_path, monkeypatch, IN_LITTLE_TIME)
    async with report.Ruler("cpu", 1) as ruler:
        limits = await ruler.limits()
        assert limits["int8"] == limits["int4"]
        short, long = [await ruler.read(size << 20) for size in (1, 300)]
    assert 0 < short < long


async def test_a_device_without_limits_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_python(tmp_path, monkeypatch, "raise SystemExit('no such device')")
    with pytest.raises(StartupError, match="limits of nowhere could not be measured: no such dev"):
        await report.measure_limits("nowhere", 1)


def test_limits_that_cannot_be_read_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read .*none.json: No such file"):
        report.read_limits(tmp_path / "none.json")
    for text in ("{", "{}", '{"limits": {"read": 3}}'):
        (tmp_path / "some.json").write_text(text)
        with pytest.raises(StartupError, match=r"some.json is not a report of podway bench"):
            report.read_limits(tmp_path / "some.json")


def test_the_best_of_two_measurements_counts() -> None:
    one, other = {"read": Limit(1.0, "a")}, {"read": Limit(2.0, "b")}
    assert report.best_of(one, other) == {"read": Limit(2.0, "b")}
