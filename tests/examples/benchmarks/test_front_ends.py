import json
from pathlib import Path

import pytest

from examples.benchmarks.server.front_ends.__main__ import Row, means, table
from examples.benchmarks.server.front_ends.client import WORD, Count, Stream
from tests.examples.running import ROOT, run_module

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
EVENT = b'data: {"content":"%s"}\n\n'


def received(*pieces: bytes) -> Count:
    """What a stream counts after its first token when these pieces come."""
    count = Count()
    count.began = 0.0
    stream = Stream(count)
    for piece in (HEAD, EVENT % WORD, *pieces):
        stream.data_received(piece)
    return count


def test_merged_tokens_are_counted_and_are_one_event() -> None:
    count = received(EVENT % (3 * WORD), EVENT % WORD + EVENT % WORD)
    assert (count.tokens, count.events, len(count.gaps)) == (5, 3, 2)


def test_a_token_that_comes_in_two_pieces_is_counted_once() -> None:
    whole = EVENT % WORD
    for cut in range(1, len(whole)):
        assert received(whole[:cut], whole[cut:]).tokens == 1


def test_an_error_of_the_server_ends_the_client() -> None:
    with pytest.raises(SystemExit, match="503 Service Unavailable"):
        Stream(Count()).data_received(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")


def test_rounds_are_averaged_for_each_server_and_number_of_streams() -> None:
    one, other = (Row("Podway", 64, rate, 20.0, 4.0, 0.025, 0.03, 1.0, 0.1) for rate in (90, 110))
    rows = means([one, Row("vLLM", 64, 80, 60.0, 20.0, 0.025, 0.03, 1.0, 0.1), other])
    assert [row.tokens_per_second for row in rows] == [100, 80]
    assert "| Podway | 64 | 100 | 20.0 | 4.0 | 25 | 30 |" in table(rows)


@pytest.mark.process
def test_podway_is_measured_over_an_engine_that_computes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "front_ends.json"
    load = ("--streams", "2", "--rate", "20", "--seconds", "0.5", "--json", out)
    run_module("benchmarks.server.front_ends", ROOT / "adapters" / "builtin", *load)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["tokens_per_second"] > 0
    assert row["front_end_microseconds"] > 0
    assert row["engine_microseconds"] > 0
