"""The one settings object: flags, PODWAY_* environment and TOML files all fill it.

Precedence: flags > environment > `--config FILE` > `podway.toml` here > defaults. This is the
only place that reads the environment. What is wrong is refused in one line that names the flag,
where the value came from and what is allowed.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from engine.errors import StartupError
from engine.policy import POLICIES
from gateway.serve.options import PREFIX, Option, allowed, as_option
from gateway.serve.options import option as _option

BUILTIN_MODEL = "builtin"
LOCAL_FILE = Path("podway.toml")
IN_MEMORY = "memory"  # instead of the store's file


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"--policy must be one of {', '.join(POLICIES)}, not {name!r}")
    return name


def _known_device(name: str) -> str:
    kind, _, number = name.partition(":")
    if name not in ("auto", "cpu", "cuda") and not (kind == "cuda" and number.isdecimal()):
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:N, not {name!r}")
    return name


class Settings(BaseSettings):
    """Everything that `podway serve` can be told. Immutable; seconds are floats, sizes bytes."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", allow_inf_nan=False, env_ignore_empty=True
    )

    model: str = _option(
        BUILTIN_MODEL,
        "model",
        "a directory, a Hugging Face hub id, the built-in model, or random:SHAPE for measuring",
        "MODEL",
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
    weights: Literal["auto", "float32", "int8", "fp8"] = _option(
        "auto", "model", "format of the linear layers; auto: as dtype says; fp8: Hopper GPUs"
    )
    activation_bits: Literal["auto", "8", "14"] = _option(
        "auto",
        "model",
        "bits to which int8 linears quantize their inputs on a CPU; auto: 8 if the CPU has VNNI, "
        "else 14; 14 keeps logits nearer to float32 and is slower on a CPU with VNNI",
    )
    device: Annotated[str, AfterValidator(_known_device)] = _option(
        "auto",
        "model",
        "cpu, cuda, or cuda:N for the GPU of the first worker; auto: a GPU where there is one",
        "DEVICE",
    )
    attention: str = _option("auto", "model", "attention backend, by its name", "NAME")
    threads: int = _option(
        0, "model", "compute threads of a worker; 0: its share of the cores", "N", ge=0, le=1024
    )
    thread_wait: Literal["spin", "sleep"] = _option(
        "spin",
        "model",
        "what compute threads do between kernels: look for work for a tenth of a millisecond "
        "before they sleep for moments, or sleep almost at once, where others need the cores",
    )
    max_model_len: int = _option(
        0, "model", "longest prompt + answer; 0: what the checkpoint allows", "TOKENS", ge=0
    )
    chat_template: Path | None = _option(
        None, "model", "a Jinja file to use instead of the checkpoint's chat template", "FILE"
    )
    tool_dialect: str = _option(
        "auto",
        "model",
        "how the model calls tools: auto (seen in its template), none, hermes, llama3, mistral, "
        "mistral-args",
        "NAME",
    )
    reasoning_dialect: str = _option(
        "auto", "model", "how it thinks aloud: auto, none, think (<think>), mistral", "NAME"
    )

    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = _option(
        "auto",
        "memory",
        "of keys and values; auto: as dtype says. On a CPU 16 bits or int8 give twice or nearly "
        "four times the room, and speed to long contexts",
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
    host_kv_memory: ByteSize = _option(
        ByteSize(0), "memory", "room on the host for KV that is swapped out; 0: none", "SIZE", ge=0
    )
    gpu_memory_utilization: float = _option(
        0.9,
        "memory",
        "share of a GPU's memory that a worker may take: weights, workspace, and KV in the rest",
        "SHARE",
        gt=0,
        le=1,
    )
    swap: Literal["proactive", "reactive", "off"] = _option(
        "proactive",
        "memory",
        "with --host-kv-memory: ahead of need where the policy preempts, when short, or never",
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
        "grow: blocks as needed, preempt when short; reserve: prompt + max_tokens up front; "
        "request: whole batches, one after the other (the baseline)",
    )
    max_batch_size: int = _option(64, "scheduling", "requests in an iteration", "N", ge=1, le=65536)
    max_batch_tokens: int = _option(
        512, "scheduling", "tokens in an iteration; longer prompts run in pieces", "TOKENS", ge=1
    )
    max_step_seconds: float = _option(
        0.5,
        "scheduling",
        "about how long a piece of a prompt may keep running answers waiting; 0: any time",
        "SECONDS",
        ge=0,
    )
    cost_model: Literal["auto", "measure", "none"] = _option(
        "auto",
        "scheduling",
        "how long steps take. auto: as saved for this model and machine, else measured; "
        "measure: anew; none: learnt while serving",
    )
    cache_dir: Path | None = _option(
        None,
        "scheduling",
        "for measurements and rounded weights; by default the user's cache",
        "DIR",
    )
    max_queue_requests: int = _option(
        2048, "scheduling", "requests that may wait before new ones get a 503", "N", ge=1
    )
    max_queue_tokens: int = _option(
        1 << 20, "scheduling", "the same bound in tokens of prompt and answer", "TOKENS", ge=1
    )

    pipeline_stages: int = _option(
        1,
        "workers",
        "shares of the layers, each with its own iteration in flight",
        "S",
        ge=1,
        le=64,
    )
    tensor_ranks: int = _option(
        1, "workers", "shares of each layer; S × R processes in all", "R", ge=1, le=64
    )
    cuda_graphs: bool = _option(
        True,
        "workers",
        "on a GPU, capture steps without prompts at the start and play them as one",
    )
    lookahead: Annotated[Literal["auto", "0", "1"], BeforeValidator(str)] = _option(
        "auto",
        "workers",
        "1: plan an iteration before the tokens it goes on from are known, so that workers need "
        "not wait for it; a request that ends may then compute one token too many; "
        "auto: on a GPU, and on CPUs where steps are short and a core is left for the loop",
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
        description="keys that clients must show, separated by commas, each also as NAME=KEY; "
        "none: open to all",
        json_schema_extra={"group": "access", "metavar": "KEYS"},
    )
    api_key_file: Path | None = _option(
        None, "access", "a TOML file of keys with limits of their own; read again on SIGHUP", "FILE"
    )
    requests_per_minute: int = _option(
        0, "access", "of each key, unless the file says otherwise; 0: no limit", "N", ge=0
    )
    tokens_per_minute: int = _option(
        0, "access", "the same in tokens of prompts and answers", "TOKENS", ge=0
    )
    max_concurrent: int = _option(
        0, "access", "requests of a key at once, unless the file says otherwise; 0: any", "N", ge=0
    )
    cors_origin: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = _option(
        (), "access", "origins whose pages may call, separated by commas; * for all", "ORIGINS"
    )
    tls_cert: Path | None = _option(
        None, "access", "a PEM file with the certificate chain; read again on SIGHUP", "FILE"
    )
    tls_key: Path | None = _option(None, "access", "a PEM file with its private key", "FILE")

    max_body_bytes: ByteSize = _option(
        ByteSize(16 << 20), "server", "largest request body", "SIZE", ge=1
    )
    max_connections: int = _option(
        0, "server", "open connections; 0: what the limit on open files allows", "N", ge=0
    )
    body_seconds: float = _option(
        60.0, "server", "how long a request body may take to arrive", "SECONDS", gt=0
    )
    stall_seconds: float = _option(
        600.0, "server", "how long a client may leave its answer unread", "SECONDS", gt=0
    )
    store: str | None = _option(
        None,
        "server",
        "where files, batches and responses are kept; 'memory' forgets them at the end; by default "
        "a file for each model in the user's state directory",
        "FILE",
    )
    max_file_bytes: ByteSize = _option(
        ByteSize(200 << 20), "server", "largest file that can be uploaded", "SIZE", ge=1
    )
    drain_seconds: float = _option(
        30.0, "server", "how long running answers may take after SIGTERM", "SECONDS", ge=0
    )
    record: Path | None = _option(
        None,
        "server",
        "write arrivals and iterations, without their texts, for podway simulate --replay",
        "FILE",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "server", "how much to log"
    )
    launcher: Literal["local", "ray"] = _option(
        "local", "workers", "local: processes of this machine; ray: actors over a Ray cluster"
    )
    ray_address: str = _option(
        "auto", "workers", "the Ray cluster; auto: the one this machine is part of", "ADDRESS"
    )
    trace: Path | None = _option(
        None,
        "workers",
        "a file for what each worker does with each step, as a Chrome trace (see ui.perfetto.dev)",
        "FILE",
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
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key need each other: give both or none")
        if self.launcher == "ray" and self.device.startswith("cuda"):
            raise ValueError(
                f"--launcher ray places workers on CPUs: --device must be auto or cpu, not "
                f"{self.device!r}"
            )
        if self.max_batch_tokens < self.max_batch_size:
            raise ValueError(
                f"--max-batch-tokens ({self.max_batch_tokens}) must be at least "
                f"--max-batch-size ({self.max_batch_size}): each request needs room for a token"
            )
        return self


def options() -> tuple[Option, ...]:
    """All settings in the order of the help."""
    return tuple(as_option(name, info) for name, info in Settings.model_fields.items())


def load(flags: Mapping[str, str | bool]) -> Settings:
    """The settings of this run; `flags` holds what the command line said, unparsed but for
    switches.

    Raises `StartupError` with one line when anything is wrong.
    """
    try:
        return Settings(**flags)  # type: ignore[arg-type] # pydantic parses them
    except ValidationError as error:
        raise StartupError(_one_line(error, flags)) from None


def _files(config: object) -> list[Path]:
    named = [Path(str(config))] if config else []
    return [*named, LOCAL_FILE] if LOCAL_FILE.is_file() else named


def _read(path: Path) -> dict[str, Any]:
    """One TOML file; keys may be spelled as flags are, with dashes."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise StartupError(f"cannot read the settings file {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the settings file {path} is not TOML: {error}") from None
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
    found = as_option(name, info)
    origin = "" if name in flags else " (from the settings file)"
    if name not in flags and found.env in os.environ:
        origin = f" (from {found.env})"
    if first["type"] == "value_error":
        return str(first["msg"]).removeprefix("Value error, ") + origin
    label = "MODEL" if name == "model" else found.flag
    return f"{label} must be {allowed(info)}, not {first['input']!r}{origin}"
