"""The CPU seconds of each test: `pytest --cpu-report FILE` writes them as JSON, prints the total.

A test's seconds are those of its process and of the child processes that ended in it; its fixtures
count apart. Children that outlive a test count where they end. The report also has what the test
processes took beside their tests: imports, collection and the last teardowns. With pytest-xdist all
workers count. Seconds of a busy machine are longer: cores share their caches and execution units.
"""

import json
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SETUP, CALL = "setup", "call"  # of a test, the fixtures' teardown within its setup
BESIDE = "(imports, collection and the last teardowns)"
KEY = "cpu_seconds"  # of what a worker sends


def cpu_seconds() -> float:
    """User and system seconds of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class CpuReport:
    """Measures in every process that runs tests, and writes in the one that started them."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self._path = path
        self._is_worker = hasattr(config, "workerinput")
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: {SETUP: 0.0, CALL: 0.0})
        self._beside = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        yield from self._measure(item, SETUP)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        yield from self._measure(item, CALL)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        yield from self._measure(item, SETUP)

    def _measure(self, item: pytest.Item, phase: str) -> Iterator[None]:
        began = cpu_seconds()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid][phase] += cpu_seconds() - began

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Send what a worker has measured; otherwise count this process's own time."""
        own = cpu_seconds() - sum_of(self.seconds)
        if not self._is_worker:
            used = resource.getrusage(resource.RUSAGE_SELF)
            has_workers = session.config.pluginmanager.hasplugin("dsession")
            self._beside += used.ru_utime + used.ru_stime if has_workers else own
            return
        output: dict[str, object] = session.config.workeroutput  # type: ignore[attr-defined]
        output[KEY] = json.dumps({"tests": self.seconds, "beside": own})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """A worker has ended; one that crashed sends nothing."""
        measured = getattr(node, "workeroutput", {}).get(KEY)
        if measured is not None:
            report = json.loads(measured)
            self.seconds.update(report["tests"])
            self._beside += report["beside"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the file, and print the total."""
        ordered = sorted(self.seconds.items(), key=lambda each: -sum(each[1].values()))
        total = sum_of(self.seconds) + self._beside
        rounded = {
            name: {phase: round(seconds, 2) for phase, seconds in phases.items()}
            for name, phases in ordered
        }
        values = {"total": round(total, 1), BESIDE: round(self._beside, 1), "tests": rounded}
        self._path.write_text(json.dumps(values, indent=1))
        terminalreporter.write_line(
            f"{total:.0f} CPU seconds, {self._beside:.0f} of them beside the tests: {self._path}"
        )


def sum_of(seconds: dict[str, dict[str, float]]) -> float:
    """The seconds of all tests."""
    return sum(sum(phases.values()) for phases in seconds.values())
