"""The one settings object: flags, PODWAY_* environment and TOML files all fill it.

Precedence: flags > environment > `--config FILE` > `podway.toml` here > defaults. This is the
only place that reads the environment. A wrong value is rejected in one line that names the flag,
where the value came from and what is allowed.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.errors import StartupError
from gateway.settings.engine import EngineSettings
from gateway.settings.flags import did_you_mean
from gateway.settings.lora import LoraSettings
from gateway.settings.options import PREFIX, Option, allowed, as_option
from gateway.settings.policy import PolicyFields
from gateway.settings.server import LOCAL_FILE, ServerSettings


class Settings(ServerSettings, LoraSettings, PolicyFields, EngineSettings):
    """All settings of `podway serve`. Immutable; durations are float seconds, sizes are bytes."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False, env_ignore_empty=True
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the files, the named one first."""
        config = init_settings().get("config") or env_settings().get("config")
        files = (InitSettingsSource(settings_cls, _read(path)) for path in _files(config))
        return (init_settings, env_settings, *files)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.kv_slots is not None and self.kv_memory is not None:
            raise ValueError("--kv-slots and --kv-memory exclude each other: give one of them")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key are used together: give both or neither")
        if self.launcher == "ray" and self.device.startswith("cuda:"):
            raise ValueError(
                "--launcher ray lets Ray choose the GPUs: --device must be auto, cpu or cuda, not "
                f"{self.device!r}"
            )
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"--max-batch-tokens ({self.max_batch_tokens}) must be at least "
                f"--max-batch-size ({self.max_batch_size}): each request needs a token"
            )
        return self


def options() -> tuple[Option, ...]:
    """All settings in the order of the help."""
    return tuple(as_option(name, info) for name, info in Settings.model_fields.items())


def load(flags: Mapping[str, str | bool | list[str]]) -> Settings:
    """The settings of this run. `flags` maps setting names to the command line's values: strings,
    booleans for switches, and lists for flags that can be repeated.

    Raises `StartupError` with one line that names the first wrong setting. A PODWAY_ variable that
    resembles a setting's is an error; any other unknown one, for instance of a Kubernetes service
    named podway, is ignored.
    """
    _check_variables(os.environ)
    try:
        return Settings(**flags)  # type: ignore[arg-type] # pydantic parses them
    except ValidationError as error:
        raise StartupError(_one_line(error, flags)) from None


def _check_variables(variables: Iterable[str]) -> None:
    names = [name.upper() for name in Settings.model_fields]
    for variable in variables:
        name = variable.removeprefix(PREFIX)
        if not variable.startswith(PREFIX) or name in names:
            continue
        if nearest := get_close_matches(name, names, n=1, cutoff=0.75):
            raise StartupError(f"unknown variable {variable}; did you mean {PREFIX}{nearest[0]}?")


def _files(config: object) -> list[Path]:
    named = [Path(str(config))] if config else []
    return [*named, LOCAL_FILE] if LOCAL_FILE.is_file() else named


def _read(path: Path) -> dict[str, Any]:
    """The settings in one TOML file; names may be written with dashes, as flags are."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(f"cannot read the settings file {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the settings file {path} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in table.items()}


def _one_line(error: ValidationError, flags: Mapping[str, object]) -> str:
    """The first error, for a person at a terminal."""
    first = error.errors()[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    name = str(first["loc"][0])
    info = Settings.model_fields.get(name)
    if info is None:
        nearest = did_you_mean(name, list(Settings.model_fields))
        return f"unknown setting {name!r} in the settings file{nearest}"
    found = as_option(name, info)
    origin = "" if name in flags else " (from the settings file)"
    if name not in flags and found.env in os.environ:
        origin = f" (from {found.env})"
    if first["type"] == "value_error":
        return str(first["msg"]).removeprefix("Value error, ") + origin
    label = "MODEL" if name == "model" else found.flag
    return f"{label} must be {allowed(info)}, not {first['input']!r}{origin}"
