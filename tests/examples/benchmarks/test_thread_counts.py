from pathlib import Path

from examples.benchmarks.layers.thread_counts import KINDS, known_steps, measure, page

OUT = Path("examples/benchmarks/results/threads")


def test_each_number_of_threads_runs_the_same_step() -> None:
    workers = {threads: known_steps("builtin", "int8", threads) for threads in (1, 2)}
    found = measure(workers, KINDS["4 rows"], 0.0)
    assert list(found["milliseconds"]) == ["1", "2"]
    assert min(found["milliseconds"].values()) > 0.0
    pools = [steps.worker.parts.device.pool.threads for steps in workers.values()]
    assert pools == [1, 2]


def test_the_page_counts_the_rows_in_which_fewer_threads_are_faster() -> None:
    row = {"model": "m", "format": "int8", "step": "1 row", "load": 0.0}
    rows = [row | {"milliseconds": {"1": 2.0, "4": 1.0}}, row | {"milliseconds": {"1": 1, "4": 2}}]
    text = page({"cpu": "C", "cores": 4, "rows": rows})
    assert "In 1 of 2 rows fewer threads are faster than all." in text
    assert "| m | int8 | 1 row | 2.00 | 1.00 | 4 |" in text
