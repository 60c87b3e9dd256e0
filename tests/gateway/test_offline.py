"""`gateway.offline.Podway`: answers of the built-in model without a server."""

import signal
from collections.abc import Iterator
from math import inf
from types import FrameType

import pytest

from engine.errors import InvalidRequest, StartupError, Unavailable
from gateway.offline import Podway

SUM = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podway]:
    cache = tmp_path_factory.mktemp("cache")
    with Podway("builtin", cost_model="none", max_batch_size=4, cache_dir=cache) as model:
        yield model


def test_prompts_are_completed_in_order(model: Podway) -> None:
    prompts: list[str | list[int]] = ["Hello", "The sea", [5, 6, 7], "Hello"] * 6
    answers = model.generate(prompts, max_tokens=6, temperature=0)
    assert len(answers) == 24
    assert answers[0] == answers[3] == answers[20]
    assert answers[0].text != answers[1].text
    assert answers[2].num_prompt_tokens == 3
    assert {answer.finish_reason for answer in answers} <= {"length", "stop"}
    alone = model.generate("The sea", max_tokens=6, temperature=0)
    assert [answer.text for answer in alone] == [answers[1].text]


def test_prompts_share_iterations(model: Podway) -> None:
    scheduler = model._service.engine.scheduler
    before = scheduler.lifecycle.num_committed
    model.generate(["one", "two", "three", "four"], max_tokens=20, ignore_eos=True)
    assert 20 <= scheduler.lifecycle.num_committed - before < 40


def test_prompts_take_whole_iterations_beside_decodes(model: Podway) -> None:
    assert model._service.engine.scheduler.settings.max_prefill_slowdown == inf


def test_conversations_are_answered(model: Podway) -> None:
    (one,) = model.chat(SUM, temperature=0)
    assert "5" in one.text
    both = model.chat([SUM, [{"role": "user", "content": "Hello!"}]], temperature=0)
    assert both[0].text == one.text
    assert len(both) == 2


def test_log_probabilities_and_several_choices_are_returned(model: Podway) -> None:
    answers = model.chat(SUM, n=2, logprobs=True, top_logprobs=2, max_tokens=4, seed=1)
    assert len(answers) == 2
    for answer in answers:
        assert answer.logprobs is not None
        tokens = answer.logprobs["content"]
        assert "".join(token["token"] for token in tokens) == answer.text
        assert all(len(token["top_logprobs"]) == 2 for token in tokens)
    (plain,) = model.generate("Hello", max_tokens=1)
    assert plain.logprobs is None


def test_an_invalid_field_is_an_error_that_names_it(model: Podway) -> None:
    with pytest.raises(InvalidRequest, match="'temperature'"):
        model.generate(["a", "b"], temperature=9)
    with pytest.raises(StartupError, match="--policy must be one of"):
        Podway("builtin", policy="lifo")


def test_an_interrupt_cancels_the_requests(model: Podway) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            model.generate(["x"] * 8, max_tokens=20_000, ignore_eos=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert model.generate("Hello", max_tokens=1)[0].num_output_tokens == 1
    assert len(model._service.engine.scheduler.pool) == 0


def test_a_closed_model_rejects_requests() -> None:
    model = Podway("builtin", cost_model="none", threads=1)
    model.close()
    model.close()
    with pytest.raises(Unavailable, match="closed"):
        model.generate("Hello")


def test_a_terminal_shows_progress(
    model: Podway, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model.generate(["a", "b"], max_tokens=1)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    model.generate(["a", "b"], max_tokens=1)
    assert "2/2" in capsys.readouterr().err
