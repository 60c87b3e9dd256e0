import hashlib
import logging
from math import inf
from pathlib import Path

import pytest

from engine.errors import StartupError
from gateway.access.key_file import Allowance, KeyDefaults
from gateway.access.keys import Keys
from gateway.errors import InvalidApiKey

FILE = """
[alice]
key = "sk-alice"
requests_per_minute = 60
weight = 2
priority = 5

[bob]
key = ["sk-bob-old", "sk-bob-new"]
"""


def in_file(directory: Path, text: str) -> Path:
    path = directory / "keys.toml"
    path.write_text(text)
    return path


def test_without_keys_no_request_needs_one() -> None:
    keys = Keys()
    assert keys.is_open
    assert keys.key_of(None).name == ""
    assert keys.key_of("Bearer whatever").name == ""


@pytest.mark.parametrize(
    ("authorization", "x_api_key"),
    [
        ("Bearer k1", None),
        ("bearer  k1 ", None),
        (None, "k1"),
        ("Bearer wrong", "k1"),
        ("Basic abc", "k1"),
        ("Basic OmsxIA==", "k1"),
        ("Basic bWU6azE=", None),
    ],
)
def test_a_key_may_be_sent_in_either_header(
    authorization: str | None, x_api_key: str | None
) -> None:
    assert Keys(["one=k1", "two=k2"]).key_of(authorization, x_api_key).name == "one"


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "says"),
    [
        (None, None, "didn't provide"),
        ("", "", "didn't provide"),
        ("Bearer ", None, "didn't provide"),
        ("Basic k1", None, "didn't provide"),
        ("Bearer k", None, "Incorrect"),
        ("Bearer k1k1", None, "Incorrect"),
        ("Bearer k\xe4", "\udcff", "Incorrect"),
        (None, "K1", "Incorrect"),
    ],
)
def test_a_request_without_a_valid_key_is_rejected(
    authorization: str | None, x_api_key: str | None, says: str
) -> None:
    with pytest.raises(InvalidApiKey, match=says):
        Keys(["k1"]).key_of(authorization, x_api_key)


def test_a_key_without_a_name_is_named_after_its_digest() -> None:
    digest = hashlib.sha256(b"k1").hexdigest()
    assert Keys(["k1"]).key_of("Bearer k1").name == digest[:16]


@pytest.mark.parametrize("key", ["YWJjZA==", "abc=", "=abc", "a b=c"])
def test_a_key_may_contain_an_equals_sign_without_having_a_name(key: str) -> None:
    assert len(Keys([key]).key_of(f"Bearer {key}").name) == 16


def test_a_file_gives_names_limits_and_several_keys_for_one_name(tmp_path: Path) -> None:
    default = Allowance(requests_per_minute=3, tokens_per_minute=4, max_concurrent=5)
    keys = Keys(["more=k"], in_file(tmp_path, FILE), KeyDefaults(default))
    assert keys.key_of("Bearer sk-alice").allowance == Allowance(60, 4, 5, 2.0, 5)
    assert keys.key_of("Bearer sk-bob-old") is keys.key_of("Bearer sk-bob-new")
    assert keys.key_of("Bearer sk-bob-old").allowance == default
    assert keys.key_of("Bearer k").name == "more"


def test_a_file_may_hold_digests_instead_of_keys(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = Keys(file=in_file(tmp_path, f'[carol]\nkey_sha256 = "{digest}"'))
    assert keys.key_of("Bearer secret").name == "carol"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no keys"),
        ("[a", "not TOML"),
        ("[a]", "needs a key"),
        ('[a]\nkey = ""', "needs a key"),
        ('[a]\nkey = ["x", ""]', "needs a key"),
        ("[a]\nkey = 1", "Expected `str | array`"),
        ('[a]\nkey = "x"\n[b]\nkey = "y"\nrate = 1', r"\[b\] .*unknown field `rate`"),
        ('[a]\nkey = "x\\n"', r"\[a\] key must not begin or end with white space"),
        ("a = 1", r"\[a\] Expected `object`"),
        ('[a]\nkey = "x"\nweight = 0', "0.001"),
        ('[a]\nkey = "x"\nmax_concurrent = -1', ">= 0"),
        ('[a]\nkey_sha256 = "sk-1"', r"\[a\] key_sha256 must be 64 hex digits$"),
        ('[a]\nkey = "x"\n[b]\nkey = "x"', "'b' occurs twice"),
        ('[a]\nkey = ["x", "x"]', "'a' occurs twice"),
    ],
)
def test_an_invalid_key_file_is_rejected_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(StartupError, match=says) as refused:
        Keys(file=in_file(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_a_missing_key_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="No such file"):
        Keys(file=tmp_path / "none.toml")


def test_a_name_may_occur_only_once() -> None:
    with pytest.raises(StartupError, match="two API keys have the name 'a'"):
        Keys(["a=1", "a=2"])


def test_the_file_is_read_again_when_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = in_file(tmp_path, FILE)
    keys = Keys(["k"], path)
    path.write_text('[dora]\nkey = "sk-dora"')
    with caplog.at_level(logging.INFO):
        keys.reload()
    assert caplog.messages == ["reloaded 2 API keys"]
    assert keys.key_of("Bearer sk-dora").name == "dora"
    assert keys.key_of("Bearer k")
    with pytest.raises(InvalidApiKey):
        keys.key_of("Bearer sk-alice")


def test_an_invalid_key_file_keeps_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = in_file(tmp_path, FILE)
    keys = Keys(file=path)
    path.write_text("")
    keys.reload()
    path.unlink()
    keys.reload()
    assert len(caplog.messages) == 2
    assert all("keeping the old API keys" in line for line in caplog.messages)
    assert keys.key_of("Bearer sk-alice").name == "alice"


@pytest.mark.parametrize(("text", "seconds"), [("50", 0.05), ("0", inf)])
def test_a_key_has_an_itl_goal_of_its_own(tmp_path: Path, text: str, seconds: float) -> None:
    keys = Keys(file=in_file(tmp_path, f'[chat]\nkey = "k"\nitl_goal_ms = {text}'))
    assert keys.key_of("Bearer k").allowance.itl_goal == seconds
