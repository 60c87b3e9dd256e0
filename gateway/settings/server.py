"""Settings of the HTTP server: addresses, keys, limits, logs, and what is kept on disk."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field
from pydantic_settings import BaseSettings, NoDecode

from gateway.observe.kv_events import check_config
from gateway.settings.options import option as _option
from gateway.settings.options import split

LOCAL_FILE = Path("podway.toml")
IN_MEMORY = "memory"  # instead of the store's file


class ServerSettings(BaseSettings):
    """The fields under `server` and `access` of `podway serve --help`."""

    host: str = _option("127.0.0.1", "server", "address to listen on", "HOST")
    port: int = _option(
        8000, "server", "port to listen on; 0: any free port", "PORT", ge=0, le=65535
    )
    max_body_bytes: ByteSize = _option(
        ByteSize(16 << 20), "server", "maximum size of a request body", "SIZE", ge=1
    )
    max_connections: int = _option(
        0,
        "server",
        "maximum open connections; 0: what the limit on open files allows",
        "N",
        ge=0,
    )
    body_seconds: float = _option(
        60.0, "server", "timeout for receiving a request body", "SECONDS", gt=0
    )
    stall_seconds: float = _option(
        600.0,
        "server",
        "timeout for a client that does not read its response",
        "SECONDS",
        gt=0,
    )
    store: str | None = _option(
        None,
        "server",
        "SQLite file for files, batches and responses; memory: keep nothing after the end; "
        "default: one file per model in the user's state directory",
        "FILE",
    )
    max_file_bytes: ByteSize = _option(
        ByteSize(200 << 20), "server", "maximum size of an uploaded file", "SIZE", ge=1
    )
    max_key_bytes: ByteSize = _option(
        ByteSize(4 << 30),
        "server",
        "maximum size of the files and batches of one API key; without keys, of all clients",
        "SIZE",
        ge=1,
    )
    max_store_bytes: ByteSize = _option(
        ByteSize(16 << 30),
        "server",
        "maximum size of all stored files, batches and responses",
        "SIZE",
        ge=1,
    )
    drain_seconds: float = _option(
        30.0, "server", "time that running requests get to finish after SIGTERM", "SECONDS", ge=0
    )
    otlp_endpoint: str | None = _option(
        None,
        "server",
        "export traces and metrics to this OpenTelemetry collector (OTLP over HTTP)",
        "URL",
    )
    kv_events_config: Annotated[str, BeforeValidator(check_config)] = _option(
        "{}",
        "server",
        "publish which prefixes are cached, for routers, over ZeroMQ; a JSON object with vLLM's "
        "fields enable_kv_cache_events, endpoint, replay_endpoint, topic, buffer_steps, hwm, "
        "max_queue_size",
        "JSON",
    )
    record: Path | None = _option(
        None,
        "server",
        "record arrivals and iterations, without texts, for podway simulate --replay",
        "FILE",
    )
    unknown_fields: Literal["ignore", "reject"] = _option(
        "ignore",
        "server",
        "what to do with unknown fields inside messages and tools, and with top-level fields of "
        "other clients and servers; ignored fields are listed in a response header",
    )
    strict_max_tokens: bool = _option(
        False,
        "server",
        "reject a max_tokens for which the context has no room, also in chats, responses and "
        "messages; by default it is an upper bound there",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "server", "lowest level of the lines that are logged"
    )
    log_format: Literal["text", "json"] = _option(
        "text", "server", "format of the log on stderr; json: one object per line"
    )
    config: Path | None = _option(
        None,
        "server",
        f"a TOML file with these settings; {LOCAL_FILE} in the current directory is always read",
        "FILE",
    )

    api_key: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)] = Field(
        (),
        repr=False,
        description="API keys that clients must send, separated by commas, each KEY or NAME=KEY; "
        "default: no key is required",
        json_schema_extra={"group": "access", "metavar": "KEYS"},
    )
    api_key_file: Path | None = _option(
        None, "access", "a TOML file of keys with limits per key; read again on SIGHUP", "FILE"
    )
    admin_api_key: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)] = Field(
        (),
        repr=False,
        description="API keys that may also use /admin, written as in --api-key; without one, "
        "/admin needs a key of the key file with admin = true, or on a server without keys a "
        "client on the same machine",
        json_schema_extra={"group": "access", "metavar": "KEYS"},
    )
    prefix_isolation: Literal["key", "off"] = _option(
        "key",
        "access",
        "key: requests share cached prefixes only with requests of the same API key, so that "
        "cached_tokens and TTFT do not reveal other keys' prompts; a common system prompt is then "
        "computed and stored once per key; off: all keys share them",
    )
    allowed_host: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)] = _option(
        (),
        "access",
        "host names that requests without an API key may name in Host, separated by commas; *: "
        "all; default: local names if --host is a loopback address, else all",
        "HOSTS",
    )
    requests_per_minute: int = _option(
        0, "access", "limit per key, unless the key file sets another; 0: no limit", "N", ge=0
    )
    tokens_per_minute: int = _option(
        0,
        "access",
        "limit per key on prompt and output tokens, unless the key file sets another; 0: no limit",
        "TOKENS",
        ge=0,
    )
    max_concurrent: int = _option(
        0,
        "access",
        "limit per key on requests at the same time, unless the key file sets another; 0: no limit",
        "N",
        ge=0,
    )
    page: bool = _option(
        True, "access", "serve the web page at /: a chat and a live view of the engine"
    )
    cors_origin: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)] = _option(
        (),
        "access",
        "origins whose web pages may call the server, separated by commas; *: all",
        "ORIGINS",
    )
    tls_cert: Path | None = _option(
        None, "access", "a PEM file with the certificate chain; read again on SIGHUP", "FILE"
    )
    tls_key: Path | None = _option(
        None, "access", "a PEM file with the certificate's private key", "FILE"
    )
