import pytest

from examples.benchmarks.server.served_memory import MOMENTS, RESERVED_BYTES, kind_of, page
from tests.examples.benchmarks.published import RESULTS, plain, read


@pytest.mark.parametrize(
    ("path", "size", "kind"),
    [
        ("/cache/0af3.packed", RESERVED_BYTES, "weights"),
        ("/models/a/model.safetensors", 1, "checkpoint"),
        ("[anon]", RESERVED_BYTES, "kv"),
        ("[anon]", RESERVED_BYTES - 1, "anon"),
        ("[heap]", 1, "heap"),
        ("/lib/libtorch_cpu.so", 1, "libraries"),
    ],
)
def test_mappings_are_counted_by_kind(path: str, size: int, kind: str) -> None:
    assert kind_of(path, size) == kind


def test_the_page_has_the_parts_of_each_total() -> None:
    server = {"weights": 0.0, "kv": 0.0, "checkpoint": 0.0, "heap": 10.0, "anon": 30.0}
    worker = {"weights": 400.0, "kv": 100.0, "checkpoint": 1.0, "heap": 70.0, "anon": 39.0}
    moment = {
        "server": {**server, "libraries": 5.0},
        "worker": {**worker, "libraries": 20.0},
        "total": 1_675,
    }
    figures = {
        "cpu": "Zen",
        "kv_dtype": "float16",
        "servers": {"ours": dict.fromkeys(MOMENTS, moment)},
        "private_dirty_of_imports": {"torch": 110.2},
    }
    lines = page(figures).splitlines()
    assert "| ours | at rest | 1,675 | 400 | 100 | 1 | 129 | 45 | 3.35 |" in lines
    assert "; KV is in float16, and" in lines[2]
    assert lines[-1] == "Pages that an import writes, in MiB: `torch` 110."


def test_the_note_on_served_memory_is_that_of_its_figures() -> None:
    note = plain((RESULTS / "offline" / "README.md").read_text())
    figures = read("served_memory/figures.json")
    moments, imports = figures["servers"]["Podway int8"], figures["private_dirty_of_imports"]
    after, worker = moments["after_a_request"], moments["after_a_request"]["worker"]
    server = sum(after["server"].values())
    rest = worker["heap"] + worker["anon"] + worker["libraries"]
    assert f"{after['total']} MiB after one request" in note
    assert f"weights are {worker['weights']:.0f} MiB and KV {worker['kv']:.0f}" in note
    assert f"The worker's other {rest:.0f} MiB" in note
    assert f"torch writes {imports['torch']:.0f} MiB, that of numba {imports['numba']:.0f}" in note
    assert f"The server's {server:.0f} MiB" in note
    assert f"imports write {imports['server_modules']:.0f}" in note
    for name in ("float32", "bfloat16", "int8", "int4"):
        one = figures["servers"][f"Podway {name}"]["after_a_request"]
        needed = one["worker"]["weights"] + one["worker"]["kv"]
        assert f"{one['total'] / needed:.2f} × in {name}" in note
