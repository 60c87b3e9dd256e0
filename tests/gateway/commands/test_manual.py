import pytest

from engine.errors import StartupError
from gateway.commands import manual
from gateway.console import ROOT


def test_without_a_topic_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert manual.main([]) == 0
    listed = capsys.readouterr().out.split()
    assert {"systemd", "several-models", "speculation", "operators"} <= set(listed)


def test_a_topic_is_its_section_of_the_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert manual.main(["reverse-proxy"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("## Reverse proxy\n")
    assert text in (ROOT / "gateway/OPERATIONS.md").read_text()


def test_sections_of_several_pages_under_one_heading_are_one_topic() -> None:
    assert manual.topics()["images"].count("## Images\n") == 3


def test_an_unknown_topic_is_refused_with_the_nearest() -> None:
    with pytest.raises(StartupError, match="no topic 'lokahead'; did you mean lookahead"):
        manual.main(["lokahead"])
