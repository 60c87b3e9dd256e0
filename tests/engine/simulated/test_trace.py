import gzip
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, pstdev

import pytest

from engine.simulated.trace import (
    SHARED_BLOCK,
    Arrival,
    BadTrace,
    at_rate,
    between,
    gamma,
    mean_rate,
    orca_lengths,
    poisson,
    read_trace,
    skewed_lengths,
    sped_up,
    steady,
)

AZURE = Path(__file__).parents[2] / "data" / "azure_2023_conv_first_1000.csv.gz"


def test_mooncake_lines_give_seconds_lengths_and_shared_blocks(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl.gz"
    line = '{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 7]}\n'
    path.write_bytes(gzip.compress(line.encode()))
    assert read_trace(path) == [Arrival(1.5, 700, 9, (4, 7))]


def test_a_trace_is_sorted_by_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("2.0,1,1\n1.0,2,2\n")
    assert [arrival.at for arrival in read_trace(path)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.csv", "arrival_s,prompt_tokens,output_tokens\n1,2\n", "line 2: expected seconds, p"),
        ("a.csv", "0,5,5\n1,x,3\n", "line 2: expected .* not .*'x'"),
        ("a.csv", "0,5,0\n", "line 1: lengths must be at least 1"),
        ("a.csv", "", "no rows"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 3}\n', "line 1: KeyError"),
        ("a.csv", "0,5,5\nnan,5,5\n", "line 2: lengths must be at least 1 and times"),
        ("a.csv", b"0,5,5\n\xff", "cannot read the trace"),
        ("a.csv.gz", b"\x1f\x8b\x08" + bytes(9) + b"\xff" * 9, "cannot read the trace"),
        ("a.jsonl", "[]\n", "line 1"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 1e999, "output_length": 1}',
            "line 1: OverflowError",
        ),
    ],
)
def test_the_error_for_an_invalid_trace_names_file_and_line(
    tmp_path: Path, name: str, text: str | bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(BadTrace, match=says):
        read_trace(path)


def test_the_error_for_a_missing_trace_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"nowhere\.csv"):
        read_trace(tmp_path / "nowhere.csv")


def test_the_sample_of_the_azure_trace_matches_its_readme() -> None:
    arrivals = read_trace(AZURE)
    assert len(arrivals) == 1000
    assert arrivals[0] == Arrival(0.0, 374, 44)


def test_prompts_share_the_blocks_with_equal_names_and_nothing_else() -> None:
    first = Arrival(0.0, 2 * SHARED_BLOCK + 10, 1, (5, 6, 7)).prompt(0)
    second = Arrival(0.0, 2 * SHARED_BLOCK + 30, 1, (5, 6, 8)).prompt(1)
    assert len(first) == 2 * SHARED_BLOCK + 10
    assert first[: 2 * SHARED_BLOCK] == second[: 2 * SHARED_BLOCK]
    assert first[2 * SHARED_BLOCK] != second[2 * SHARED_BLOCK]


def test_prompts_without_blocks_differ_in_their_first_token() -> None:
    arrival = Arrival(0.0, 3, 1)
    assert arrival.prompt(0)[0] != arrival.prompt(1)[0]


def test_tokens_after_the_named_blocks_are_unique_to_the_request() -> None:
    prompt = Arrival(0.0, SHARED_BLOCK + 2, 1, (5,)).prompt(3)
    assert prompt[:SHARED_BLOCK] == (5,) * SHARED_BLOCK
    assert prompt[SHARED_BLOCK:] == Arrival(0.0, 2, 1).prompt(3)


def test_poisson_and_gamma_gaps_have_the_requested_rate_and_variation() -> None:
    for variation in (0.5, 1.0, 3.0):
        arrivals = gamma(4.0, 8_000, orca_lengths, Random(1), variation)
        gaps = [b.at - a.at for a, b in pairwise(arrivals)]
        assert mean(gaps) == pytest.approx(0.25, rel=0.15)
        assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.15)
    assert mean_rate(poisson(4.0, 8_000, orca_lengths, Random(1))) == pytest.approx(4.0, rel=0.15)


def test_steady_arrivals_have_equal_gaps() -> None:
    assert [a.at for a in steady(2.0, 3, orca_lengths, Random(1))] == [0.5, 1.0, 1.5]


def test_skewed_lengths_follow_zipf_up_to_their_maximum() -> None:
    random, lengths = Random(2), skewed_lengths(8, 4, exponent=1.0)
    sampled = [lengths(random) for _ in range(8_000)]
    assert {prompt for prompt, _ in sampled} == set(range(1, 9))
    ones = sum(output == 1 for _, output in sampled)
    assert ones / 8_000 == pytest.approx(1 / (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.03)


def test_a_trace_is_sped_up_cut_and_scaled_to_a_rate() -> None:
    arrivals = [Arrival(at, 1, 1) for at in (10.0, 11.0, 13.0)]
    assert [a.at for a in sped_up(arrivals, 2.0)] == [0.0, 0.5, 1.5]
    assert mean_rate(at_rate(arrivals, 5.0)) == pytest.approx(5.0)
    assert [a.at for a in between(arrivals, 11.0, 13.0)] == [11.0]
