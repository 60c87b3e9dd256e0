import tomllib
from hashlib import sha256
from pathlib import Path

import pytest

from engine.errors import StartupError
from gateway.access.keys import Keys
from gateway.commands import key as command
from gateway.errors import InvalidApiKey


def new_key(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert command.main(["new", *argv]) == 0
    return capsys.readouterr().out.strip()


def test_a_new_key_is_accepted_with_its_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.toml"
    first = new_key(capsys, "alice", "--file", str(file), "--requests-per-minute", "5")
    second = new_key(capsys, "bob.2", "--file", str(file), "--weight", "2.5", "--admin")
    assert first not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    keys = Keys(file=file)
    alice, bob = keys.key_of(f"Bearer {first}"), keys.key_of(f"Bearer {second}")
    assert (alice.name, alice.allowance.requests_per_minute) == ("alice", 5)
    assert (bob.name, bob.allowance.weight, bob.is_admin) == ("bob.2", 2.5, True)
    with pytest.raises(InvalidApiKey):
        keys.key_of(f"Bearer {first}x")


def test_without_a_file_the_entry_is_printed_and_the_key_beside_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.main(["new", "alice"]) == 0
    printed = capsys.readouterr()
    table = tomllib.loads(printed.out)["alice"]
    key = printed.err.split()[-1]
    assert table == {"key_sha256": sha256(key.encode()).hexdigest()}


def test_a_name_that_exists_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.toml"
    file.touch()
    new_key(capsys, "alice", "--file", str(file))
    before = file.read_text()
    with pytest.raises(StartupError, match="already has a key named 'alice'"):
        command.main(["new", "alice", "--file", str(file)])
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["new", "a b"], "NAME must be 1 to 64 letters"),
        (["new", "a", "--file", "none/keys.toml"], "cannot write the key file none/keys.toml"),
        (["new", "a", "--weight", "5000"], r"<= 1000.*\.weight"),
    ],
)
def test_an_entry_that_cannot_be_written_is_an_error(argv: list[str], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        command.main(argv)


def test_a_file_that_is_not_a_key_file_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[alice]\nport = 1\n")
    with pytest.raises(StartupError, match="the key file"):
        command.main(["new", "bob", "--file", str(file)])
    assert file.read_text() == "[alice]\nport = 1\n"
