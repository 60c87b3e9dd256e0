"""Lengths, arrivals and traces."""

import gzip
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.commands.bench.workload import (
    RandomPrompts,
    Shot,
    Span,
    WorkloadError,
    at_once,
    at_random,
    read_trace,
)


def test_a_span_is_a_length_or_a_range() -> None:
    assert Span.parse("128") == (128, 128)
    assert Span.parse("32..512") == (32, 512)


@pytest.mark.parametrize("text", ["", "0", "0..4", "9..3", "1..", "..4", "a", "1.5"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Span.parse(text)


def test_the_same_seed_gives_the_same_shots() -> None:
    spans = Span(32, 512), Span(1, 128)
    assert at_random(50, 2.0, *spans, seed=3) == at_random(50, 2.0, *spans, seed=3)
    assert at_once(50, *spans, seed=3) != at_once(50, *spans, seed=4)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    shots = at_random(4000, 5.0, Span(1, 1), Span(1, 1), seed=0)
    gaps = [after.at - before.at for before, after in pairwise(shots)]
    assert statistics.mean(gaps) == pytest.approx(1 / 5.0, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5.0, rel=0.05)


def test_a_csv_trace_starts_at_its_first_arrival_and_runs_at_the_scale(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n10.0,100,7\n14.0,50,1\n12.0,9,3\n")
    assert read_trace(path, 2.0, None) == [
        Shot(0, 0.0, 100, 7),
        Shot(1, 1.0, 9, 3),
        Shot(2, 2.0, 50, 1),
    ]
    assert read_trace(path, 1.0, 1) == [Shot(0, 0.0, 100, 7)]


def test_a_mooncake_trace_counts_in_milliseconds_and_shares_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]}\n'
        '{"timestamp": 4000, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]}\n'
    )
    first, second = read_trace(path, 1.0, None)
    assert (first.at, second.at) == (0.0, 3.0)
    prompts = RandomPrompts(seed=0, ids=Span(10, 99))
    one, two = prompts.of(first), prompts.of(second)
    assert (len(one), len(two)) == (600, 700)
    assert one[:512] == two[:512]
    assert one[512:] != two[512:600]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "arrival_s,prompt_tokens,output_tokens\n", "has no rows"),
        ("t.csv", "0.5,many,3\n", "line 1"),
        ("t.csv", "0.5,3\n", "line 1"),
        ("t.jsonl", '{"timestamp": 1}\n', "line 1"),
        ("t.jsonl", "{\n", "line 1"),
    ],
)
def test_a_trace_that_cannot_be_read_says_so(
    tmp_path: Path, name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(WorkloadError, match=says):
        read_trace(tmp_path / name, 1.0, None)


def test_a_missing_trace_says_so(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(tmp_path / "none.csv", 1.0, None)


def test_prompts_are_distinct_repeatable_and_of_the_length_asked_for() -> None:
    ids = RandomPrompts(seed=1, ids=Span(300, 310))
    prompt = ids.of(Shot(0, 0.0, 40, 1))
    assert len(prompt) == 40
    assert set(prompt) <= set(range(300, 311))
    assert prompt == ids.of(Shot(0, 5.0, 40, 9))
    assert prompt != ids.of(Shot(1, 0.0, 40, 1))
    text = RandomPrompts(seed=1, ids=None).of(Shot(0, 0.0, 12, 1))
    assert isinstance(text, str)
    assert len(text.split()) == 12
