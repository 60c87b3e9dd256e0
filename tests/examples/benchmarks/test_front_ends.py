import json
from pathlib import Path

import pytest

from examples.benchmarks.server.front_ends.__main__ import Row, means, table
from examples.benchmarks.server.front_ends.client import WORD, Count, Stream
from tests.examples.benchmarks.published import RESULTS, plain, read
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


def measured() -> dict[tuple[str, int], Row]:
    rows = [Row(**row) for row in read("streaming/front_ends.json")["rows"]]
    return {(row.server, row.streams): row for row in means(rows)}


def test_the_page_has_the_means_of_all_rounds() -> None:
    found = read("streaming/front_ends.json")
    page = (RESULTS / "streaming" / "README.md").read_text()
    assert table(list(measured().values())) in page
    assert len(found["rows"]) == found["rounds"] * len(measured())
    assert f"Mean of {found['rounds']} rounds" in plain(page)
    assert f"(load average {found['load_average'][0]:.1f})" in page


def test_what_the_page_says_of_the_front_ends_follows_from_the_table() -> None:
    rows = measured()
    page = plain((RESULTS / "streaming" / "README.md").read_text())

    def cost(server: str, streams: int) -> float:
        return rows[server, streams].front_end_microseconds

    own = cost("Podway", 256)
    others = [cost(server, 256) / own for server in ("vLLM", "SGLang")]
    assert f"vLLM's takes {others[0]:.1f} times and SGLang's {others[1]:.1f} times the CPU" in page
    wanted = 1024 * read("streaming/front_ends.json")["rate"]
    shares = {server: rows[server, 1024].tokens_per_second / wanted for server, _ in rows}
    assert f"Of {wanted:,.0f} tokens/s Podway streams {shares['Podway']:.0%}" in page
    most = f"{shares['vLLM']:.0%} (with two API servers {shares['vLLM, 2 API servers']:.0%})"
    assert f"vLLM {most} and SGLang {shares['SGLang']:.0%}" in page


def test_the_page_says_where_vllm_in_rust_is_ahead() -> None:
    rows = measured()
    page = plain((RESULTS / "streaming" / "README.md").read_text())
    name = "vLLM, Rust front end"
    for streams in (64, 1024):
        costs = (rows[server, streams].front_end_microseconds for server in (name, "Podway"))
        assert "{:.1f} µs against {:.1f}".format(*costs) in page
    rust, own = rows[name, 1024], rows["Podway", 1024]
    gaps = f"{1000 * rust.gap_p50:.0f} ms against {1000 * own.gap_p50:.0f}"
    late = f"{1000 * rust.gap_p99:.0f} against {1000 * own.gap_p99:.0f}"
    assert f"a gap of {gaps} (p99 {late})" in page
    assert f"merges {own.tokens_per_event:.1f} tokens into an event" in page
    whole = [row.front_end_microseconds + row.engine_microseconds for row in (rust, own)]
    assert f"takes {whole[0]:.1f} µs and Podway {whole[1]:.1f}" in page
