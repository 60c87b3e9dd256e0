import gzip
from pathlib import Path

import pytest

from gateway.commands.bench.workload import (
    LengthRange,
    PlannedRequest,
    RandomPrompts,
    WorkloadError,
    closed_loop_requests,
    poisson_requests,
    read_trace,
)


def test_a_length_range_is_a_length_or_two() -> None:
    assert LengthRange.parse("128") == (128, 128)
    assert LengthRange.parse("32..512") == (32, 512)


@pytest.mark.parametrize("text", ["", "0", "0..4", "9..3", "1..", "..4", "a", "1.5"])
def test_other_text_is_not_a_length_range(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        LengthRange.parse(text)


def test_the_same_seed_gives_the_same_requests() -> None:
    ranges = LengthRange(32, 512), LengthRange(1, 128)
    assert poisson_requests(50, 2.0, *ranges, seed=3) == poisson_requests(50, 2.0, *ranges, seed=3)
    assert closed_loop_requests(50, *ranges, seed=3) != closed_loop_requests(50, *ranges, seed=4)


def test_a_csv_trace_starts_at_its_first_arrival_and_runs_at_the_scale(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("arrival_s,prompt_tokens,output_tokens\n10.0,100,7\n14.0,50,1\n12.0,9,3\n")
    assert read_trace(path, 2.0, None) == [
        PlannedRequest(0, 0.0, 100, 7),
        PlannedRequest(1, 1.0, 9, 3),
        PlannedRequest(2, 2.0, 50, 1),
    ]
    assert read_trace(path, 1.0, 1) == [PlannedRequest(0, 0.0, 100, 7)]


def test_a_mooncake_trace_counts_in_milliseconds_and_shares_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]}\n'
        '{"timestamp": 4000, "input_length": 700, "output_length": 5, "hash_ids": [7, 9]}\n'
    )
    first, second = read_trace(path, 1.0, None)
    assert (first.at, second.at) == (0.0, 3.0)
    prompts = RandomPrompts(seed=0, ids=LengthRange(10, 99))
    one, two = prompts.of(first), prompts.of(second)
    assert (len(one), len(two)) == (600, 700)
    assert one[:512] == two[:512]
    assert one[512:] != two[512:600]


def test_a_trace_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with pytest.raises(WorkloadError, match="No such file"):
        read_trace(path, 1.0, None)
    path.write_text("0.5,many,3\n")
    with pytest.raises(WorkloadError, match="line 1"):
        read_trace(path, 1.0, None)


def test_prompts_are_distinct_and_repeatable_and_have_the_requested_length() -> None:
    ids = RandomPrompts(seed=1, ids=LengthRange(300, 310))
    prompt = ids.of(PlannedRequest(0, 0.0, 40, 1))
    assert len(prompt) == 40
    assert set(prompt) <= set(range(300, 311))
    assert prompt == ids.of(PlannedRequest(0, 5.0, 40, 9))
    assert prompt != ids.of(PlannedRequest(1, 0.0, 40, 1))
    text = RandomPrompts(seed=1, ids=None).of(PlannedRequest(0, 0.0, 12, 1))
    assert isinstance(text, str)
    assert len(text.split()) == 12
