from gateway.serve.announced import StartTimes


def summary_of(*reports: tuple[float, str, int], end: float) -> str | None:
    """The summary at `end` after reports of (time, label, done of 2); the start was at 10."""
    now = [10.0]
    start = StartTimes(lambda *_: None, 10.0, lambda: now[0])
    for at, label, done in reports:
        now[0] = at
        start(label, done, 2)
    now[0] = end
    return start.summary()


def test_a_slow_start_is_explained_by_its_parts() -> None:
    summary = summary_of(
        (12.0, "kernels", 0),
        (19.0, "kernels", 1),
        (20.0, "kernels", 2),
        (20.01, "weights", 1),
        (27.0, "weights", 2),
        end=27.5,
    )
    assert summary == "took 17.5 s: 2.0 s imports, 8.0 s kernels, 0.5 s the rest, 7.0 s weights"


def test_a_quick_start_needs_no_explanation() -> None:
    assert summary_of((12.0, "kernels", 0), (12.1, "kernels", 2), end=13.9) is None


def test_progress_is_passed_on() -> None:
    shown: list[tuple[str, int, int]] = []
    start = StartTimes(lambda *report: shown.append(report), 0.0, lambda: 0.0)
    start("weights", 1, 3)
    assert shown == [("weights", 1, 3)]
