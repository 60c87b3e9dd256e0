"""The one settings object: flags, PODWAY_* environment and TOML files all fill it.

Precedence: flags > environment > `--config FILE` > `podway.toml` here > defaults. This is the
only place that reads the environment. What is wrong is refused in one line that names the flag,
where the value came from and what is allowed.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.errors import RefusedToStart
from engine.policy import POLICIES

BUILTIN_MODEL = "builtin"
LOCAL_FILE = Path("podway.toml")
SWITCH = ("true", "false")
_PREFIX = "PODWAY_"


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, not {name!r}")
    return name


def _option(
    default: Any,
    group: str,
    description: str,
    metavar: str = "",
    *,
    ge: int | None = None,
    gt: int | None = None,
    le: int | None = None,
) -> Any:
    """A field that is also a flag of `podway serve`, listed under `group` in its help."""
    extra: dict[str, Any] = {"group": group, "metavar": metavar}
    return Field(default, description=description, json_schema_extra=extra, ge=ge, gt=gt, le=le)


class Settings(BaseSettings):
    """Everything that `podway serve` can be told. Immutable; seconds are floats, sizes bytes."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, frozen=True, extra="forbid", allow_inf_nan=False, env_ignore_empty=True
    )

    model: str = _option(
        BUILTIN_MODEL, "model", "a directory, a Hugging Face hub id, or the built-in model", "MODEL"
    )
    served_model_name: str | None = _option(
        None,
        "model",
        "name that clients use; by default the directory's name or the hub id",
        "NAME",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "model", "of weights and activations; auto: what the machine is fast at"
    )
    device: str = _option("auto", "model", "auto, cpu, cuda or cuda:N", "DEVICE")
    attention: str = _option("auto", "model", "attention backend, by its name", "NAME")
    threads: int = _option(0, "model", "compute threads; 0: one per core", "N", ge=0, le=1024)
    max_model_len: int = _option(
        0, "model", "longest prompt + answer; 0: what the checkpoint allows", "TOKENS", ge=0
    )
    chat_template: Path | None = _option(
        None, "model", "a Jinja file to use instead of the checkpoint's chat template", "FILE"
    )

    kv_slots: int | None = _option(
        None,
        "memory",
        "room for keys and values, in tokens; by default what memory allows",
        "N",
        ge=1,
    )
    kv_memory: ByteSize | None = _option(
        None, "memory", "the same in bytes, for instance 2GiB; excludes --kv-slots", "SIZE", ge=1
    )
    block_size: int = _option(16, "memory", "slots in a block", "N", ge=1, le=4096)

    prefix_cache: bool = _option(
        True,
        "memory",
        "keep what was computed while there is room, for prompts that begin alike",
    )

    policy: Annotated[str, AfterValidator(_known_policy)] = _option(
        "fcfs", "scheduling", "who runs next: " + ", ".join(POLICIES), "NAME"
    )
    admission: Literal["grow", "reserve", "request"] = _option(
        "grow",
        "scheduling",
        "grow: blocks as needed, recompute when short; reserve: prompt + max_tokens up front; "
        "request: whole batches, one after the other (the baseline)",
    )
    max_batch_size: int = _option(64, "scheduling", "requests in an iteration", "N", ge=1, le=65536)
    max_batch_tokens: int = _option(
        512, "scheduling", "tokens in an iteration; longer prompts run in pieces", "TOKENS", ge=1
    )
    max_queue_requests: int = _option(
        2048, "scheduling", "requests that may wait before new ones get a 503", "N", ge=1
    )
    max_queue_tokens: int = _option(
        1 << 20, "scheduling", "the same bound in tokens of prompt and answer", "TOKENS", ge=1
    )

    max_restarts: int = _option(
        3, "workers", "times that a worker may be started again within ten minutes", "N", ge=0
    )
    step_seconds: float = _option(
        120.0, "workers", "an iteration that takes longer counts as a hang", "SECONDS", gt=0
    )

    host: str = _option("127.0.0.1", "server", "address to listen on", "HOST")
    port: int = _option(
        8000, "server", "port to listen on; 0: any free one", "PORT", ge=0, le=65535
    )
    api_key: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        (),
        repr=False,
        description="keys that clients must show, separated by commas; none: open to all",
        json_schema_extra={"group": "server", "metavar": "KEYS"},
    )
    max_body_bytes: ByteSize = _option(
        ByteSize(16 << 20), "server", "largest request body", "SIZE", ge=1
    )
    drain_seconds: float = _option(
        30.0, "server", "how long running answers may take after SIGTERM", "SECONDS", ge=0
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "server", "how much to log"
    )
    config: Path | None = _option(
        None, "server", f"a TOML file with these settings; {LOCAL_FILE} here is read anyway", "FILE"
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
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"--max-batch-tokens ({self.max_batch_tokens}) must be at least "
                f"--max-batch-size ({self.max_batch_size}): each request needs room for a token"
            )
        return self


class Option(NamedTuple):
    """One setting as a person sees it."""

    name: str
    group: str
    metavar: str
    default: str
    description: str
    choices: tuple[str, ...]

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value: `--name` or `--no-name`."""
        return self.choices == SWITCH

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return _PREFIX + self.name.upper()


def options() -> tuple[Option, ...]:
    """All settings in the order of the help."""
    return tuple(_as_option(name, info) for name, info in Settings.model_fields.items())


def load(flags: Mapping[str, str | bool]) -> Settings:
    """The settings of this run; `flags` holds what the command line said, unparsed but for
    switches.

    Raises `RefusedToStart` with one line when anything is wrong.
    """
    try:
        return Settings(**flags)  # type: ignore[arg-type] # pydantic parses them
    except ValidationError as error:
        raise RefusedToStart(_one_line(error, flags)) from None


def _as_option(name: str, info: FieldInfo) -> Option:
    extra = info.json_schema_extra
    assert isinstance(extra, dict), f"setting {name} is not an _option"
    default = "" if info.default in (None, ()) else str(info.default)
    if isinstance(info.default, bool):
        default = SWITCH[not info.default]
    if isinstance(info.default, ByteSize):
        default = info.default.human_readable(separator="").replace(".0", "")
    return Option(
        name=name,
        group=str(extra["group"]),
        metavar=str(extra["metavar"]),
        default=default,
        description=info.description or "",
        choices=_choices(info),
    )


def _kind(info: FieldInfo) -> Any:
    """The field's type without `| None`."""
    if get_origin(info.annotation) in (Union, UnionType):
        return next(arg for arg in get_args(info.annotation) if arg is not NoneType)
    return info.annotation


def _choices(info: FieldInfo) -> tuple[str, ...]:
    kind = _kind(info)
    if kind is bool:
        return SWITCH
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _allowed(info: FieldInfo) -> str:
    """What a field takes, in words."""
    if choices := _choices(info):
        return "one of " + ", ".join(choices)
    if _kind(info) is ByteSize:
        return "a size such as 512MiB or 2GiB"
    noun = {int: "a whole number", float: "a number"}.get(_kind(info), "text")
    bounds = {
        key: getattr(m, key) for m in info.metadata for key in ("ge", "gt", "le") if hasattr(m, key)
    }
    if "gt" in bounds:
        return f"{noun} above {bounds['gt']}"
    if "ge" in bounds and "le" in bounds:
        return f"{noun} from {bounds['ge']} to {bounds['le']}"
    return f"{noun}, at least {bounds['ge']}" if "ge" in bounds else noun


def _files(config: object) -> list[Path]:
    named = [Path(str(config))] if config else []
    return [*named, LOCAL_FILE] if LOCAL_FILE.is_file() else named


def _read(path: Path) -> dict[str, Any]:
    """One TOML file; keys may be spelled as flags are, with dashes."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RefusedToStart(f"cannot read the settings file {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise RefusedToStart(f"the settings file {path} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in table.items()}


def _one_line(error: ValidationError, flags: Mapping[str, str | bool]) -> str:
    """The first thing that is wrong, for a person at a terminal."""
    first = error.errors()[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    name = str(first["loc"][0])
    info = Settings.model_fields.get(name)
    if info is None:
        return f"unknown setting {name!r} in the settings file"
    option = _as_option(name, info)
    origin = "" if name in flags else " (from the settings file)"
    if name not in flags and option.env in os.environ:
        origin = f" (from {option.env})"
    if first["type"] == "value_error":
        return str(first["msg"]).removeprefix("Value error, ") + origin
    label = "MODEL" if name == "model" else option.flag
    return f"{label} must be {_allowed(info)}, not {first['input']!r}{origin}"
