from pathlib import Path
from typing import Any

import pytest

from adapters.models.checkpoint import read_generation_config
from engine.errors import StartupError
from gateway.schema.fields.sampling import SamplingDefaults
from gateway.settings.generation_config import sampling_defaults
from gateway.settings.settings import load

QWEN = {
    "do_sample": True,
    "eos_token_id": [1, 2],
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "transformers_version": "4.51.0",
}


def test_sampling_values_of_the_file_are_the_defaults() -> None:
    expected = SamplingDefaults(0.7, 0.8, 20, 0.0, 1.05)
    assert sampling_defaults(QWEN, "{}") == expected
    assert str(expected) == (
        "temperature 0.7, top_p 0.8, top_k 20, min_p 0, repetition_penalty 1.05"
    )


def test_a_checkpoint_without_the_file_has_openais_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(read_generation_config(tmp_path), "{}") == SamplingDefaults()


def test_the_flag_replaces_values_and_null_restores_openais() -> None:
    override = '{"temperature": 0.1, "top_k": null, "min_p": 0.05}'
    assert sampling_defaults(QWEN, override) == SamplingDefaults(0.1, 0.8, 0, 0.05, 1.05)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 3), ("top_k", 1.5), ("top_p", "high"), ("min_p", True)]
)
def test_a_wrong_value_in_the_file_names_field_and_flag(name: str, value: Any) -> None:
    with pytest.raises(StartupError, match=f"'{name}'.*--override-generation-config"):
        sampling_defaults({name: value}, "{}")


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"temprature": 1}', '{"temperature": 9}', '{"top_k": -2}']
)
def test_a_wrong_flag_is_rejected_before_anything_is_loaded(text: str) -> None:
    with pytest.raises(StartupError, match="--override-generation-config"):
        load({"override_generation_config": text})


def test_a_settings_file_may_have_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "podway.toml").write_text("override-generation-config = {top_k = 20}")
    monkeypatch.chdir(tmp_path)
    assert load({}).model.override_generation_config == '{"top_k": 20}'


@pytest.mark.parametrize("names", ["a,,b", "a,a", ","])
def test_model_names_must_differ(names: str) -> None:
    with pytest.raises(StartupError, match="--served-model-name"):
        load({"served_model_name": names})
