import io
import json
import logging
import shlex
from dataclasses import replace

import pytest

from gateway.serve.terminal import LoadingBars, banner, curl_line, url_of
from gateway.settings.settings import load
from tests.worker_settings import worker_report

REPORT = worker_report(
    architecture="LlamaForCausalLM",
    num_parameters=3_100_000,
    vocab_size=4096,
    max_model_len=2048,
    num_blocks=1024,
    bytes_per_block=1 << 20,
    threads=2,
    kernels="AVX2",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_banner_has_address_model_and_memory() -> None:
    text = banner(
        "http://127.0.0.1:8000", "demo", REPORT, load({}), {"cost": "2 ms per decode step"}
    )
    for fact in ("demo at http://127.0.0.1:8000", "3.1 M", "16,384 slots", "1,024 MiB",
                 "1 worker, 2 threads, AVX2",
                 "float32 on cpu", "policy fcfs", "admission grow"):  # fmt: skip
        assert fact in text
    small = banner("u", "demo", replace(REPORT, kv_dtype="int8"), load({}), {"cost": "2 ms"})
    assert "1,024 MiB of int8" in small
    assert "MiB of" not in text


def test_the_banner_says_that_the_kv_cache_is_smaller_than_the_context() -> None:
    small = replace(REPORT, num_blocks=100)
    for report, is_said in ((REPORT, False), (small, True)):
        text = banner("http://127.0.0.1:8000", "m", report, load({}), {"cost": "2 ms"})
        assert (", the longest request (--kv-memory), " in text) == is_said


def test_the_curl_line_can_be_copied() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "it's", with_key=False))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[-1])
    assert (body["model"], body["stream"]) == ("it's", True)
    assert "bearer" not in words
    assert "$KEY" in curl_line("http://x", "m", with_key=True)


def test_the_url_can_be_opened_on_this_machine() -> None:
    assert url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000"
    assert url_of("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert url_of("::1", 1) == "http://[::1]:1"
    assert url_of("::", 1) == "http://[::1]:1"


def test_without_a_terminal_each_loading_label_is_two_plain_lines() -> None:
    stream = io.StringIO()
    with LoadingBars(stream) as progress:
        for done in range(4):
            progress("weights", done, 3)
        progress("warm-up", 1, 1)
    assert stream.getvalue() == "weights: 0 of 3\nweights: 3 of 3\nwarm-up: 1 of 1\n"


def test_on_a_terminal_loading_is_a_bar_that_is_removed() -> None:
    stream = Terminal()
    with LoadingBars(stream) as progress:
        progress("weights", 1, 2)
        progress.stop()
    assert "weights" in stream.getvalue()


def test_the_banner_has_the_number_of_workers() -> None:
    shown = banner(
        "u", "m", REPORT, load({"pipeline_stages": "2", "tensor_ranks": "3"}), {"cost": "c"}
    )
    assert "2 stages × 3 ranks, 2 threads" in shown


def test_progress_is_lines_of_the_log_if_the_log_is_json(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with caplog.at_level(logging.INFO), LoadingBars(stream, logs=True) as bars:
        for done in (0, 1, 2):
            bars("weights", done, 2)
    assert [each.getMessage() for each in caplog.records] == ["weights: 0 of 2", "weights: 2 of 2"]
    assert stream.getvalue() == ""
