from pathlib import Path

import pytest

from engine.errors import StartupError
from gateway.serve import memory
from gateway.serve.memory import parts_of, weight_bytes
from gateway.settings.settings import load

TABLES = """
port = 9000
threads = 2

[models.chat]
model = "builtin"
served_model_name = ["gpt-4o", "small"]
pinned = true
threads = 1

[models.embedder]
model = "builtin"
task = "embed"
idle-unload = "10m"
share = 0.5
"""


def startup_error(*models: str) -> str:
    with pytest.raises(StartupError) as failed:
        load({"model": models})
    return str(failed.value)


def test_a_table_has_what_differs_from_the_settings_outside(bare: Path) -> None:
    (bare / "podway.toml").write_text(TABLES)
    settings = load({"kv_slots": "64"})
    chat, embedder = settings.deployments
    assert settings.http.port == 9000
    assert chat.model.served_model_name == ("chat", "gpt-4o", "small")
    assert embedder.model.served_model_name == ("embedder",)
    assert (chat.kernels.threads, embedder.kernels.threads) == (1, 2)
    assert (chat.terms.pinned, embedder.terms.pinned) == (True, False)
    assert (embedder.terms.idle_unload, embedder.terms.share) == (600.0, 0.5)
    assert {each.kv.kv_slots for each in settings.deployments} == {64}


def test_the_command_line_chooses_tables_and_other_models(bare: Path) -> None:
    (bare / "podway.toml").write_text(TABLES)
    (only,) = load({"model": "embedder"}).deployments
    assert only.model.task == "embed"
    (other,) = load({"model": "random:tiny"}).deployments
    assert (other.model.source, other.model.task) == ("random:tiny", "auto")
    first, second = load({"model": ["chat", "random:tiny"]}).deployments
    assert (first.model.source, second.model.source) == ("builtin", "random:tiny")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[models.a]\nmodel = 'builtin'\nport = 1",
            "'port' in [models.a] is a setting of the server",
        ),
        ("[models.a]\nmodel = 'builtin'\nthread = 1", "did you mean threads?"),
        ("[models.'a,b']\nmodel = 'builtin'", "[models.a,b]: a name has no comma"),
        ("[models.' a']\nmodel = 'builtin'", "[models. a]: a name has no comma"),
        ("[models.a]\nthreads = 1", "[models.a] needs 'model'"),
        ("[models.a]\nmodel = 'builtin'\nidle_unload = 'soon'", "--idle-unload must be a duration"),
        ("model = 'builtin'\n[models.a]\nmodel = 'builtin'", "'model' (from"),
        ("models = 1", "models must be tables"),
    ],
)
def test_a_wrong_table_is_an_error_that_names_it(bare: Path, text: str, message: str) -> None:
    (bare / "podway.toml").write_text(text)
    assert message in startup_error()


def test_two_models_need_two_names(bare: Path) -> None:
    assert "named twice" in startup_error("builtin", "builtin")


def test_models_have_equal_parts_of_the_memory(bare: Path) -> None:
    (bare / "podway.toml").write_text(TABLES)
    parts = parts_of(load({}).deployments, 1 << 30)
    assert [part.num_bytes for part in parts] == [1 << 29, 1 << 29]
    weights = weight_bytes(parts[0].settings)
    assert 0 < weights < 100 << 20
    assert parts[0].settings.kv.kv_memory_limit == (1 << 29) - weights


def test_a_model_that_does_not_fit_says_how_many_bytes_are_missing(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare / "podway.toml").write_text(TABLES)
    monkeypatch.setattr(memory, "weight_bytes", lambda settings: 600 << 20)
    with pytest.raises(StartupError, match="needs 800 MiB beside the pinned models: 576 MiB of"):
        parts_of(load({}).deployments, 1 << 30)
