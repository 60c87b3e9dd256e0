"""Settings of the HTTP server: addresses, limits, API keys, logs, and what is kept on disk."""

from dataclasses import dataclass
from pathlib import Path

from engine.setting import advanced, secret, setting
from gateway.observe.kv_events import KVEventsConfig, check_config

LOCAL_FILE = Path("podway.toml")
IN_MEMORY = "memory"  # instead of the store's file


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Where the server listens, for whom, and how long it waits for clients."""

    host: str = setting("127.0.0.1", "server", "address to listen on", "HOST")
    port: int = setting(
        8000, "server", "port to listen on; 0: any free port", "PORT", ge=0, le=65535
    )
    max_body_bytes: int = setting(
        16 << 20, "server", "maximum size of a request body", "SIZE", unit="bytes", ge=1
    )
    max_connections: int = advanced(
        0, "server", "maximum open connections; 0: what the limit on open files allows", "N", ge=0
    )
    max_address_connections: int = advanced(
        0,
        "server",
        "maximum open connections of one client address; 0: a quarter of all, at least 64; behind "
        "a proxy all clients have one address",
        "N",
        ge=0,
    )
    body_seconds: float = advanced(
        60.0, "server", "timeout for receiving a request body", "SECONDS", gt=0
    )
    stall_seconds: float = advanced(
        600.0, "server", "timeout for a client that does not read its response", "SECONDS", gt=0
    )
    keepalive_whole: float = advanced(
        0.0,
        "server",
        "send a space this often while a response that is not streamed is generated, so that "
        "clients and proxies do not give up; its status is then 200, also of an error; 0: never",
        "SECONDS",
        ge=0,
    )
    drain_seconds: float = setting(
        30.0, "server", "time that running requests get to finish after SIGTERM", "SECONDS", ge=0
    )
    upgrade_seconds: float = advanced(
        900.0, "server", "time that a new server gets to be ready in an upgrade", "SECONDS", gt=0
    )
    unknown_fields: str = advanced(
        "ignore",
        "server",
        "what to do with unknown fields inside messages and tools, and with top-level fields of "
        "other clients and servers; ignored fields are listed in a response header",
        choices=("ignore", "reject"),
    )
    strict_max_tokens: bool = advanced(
        False,
        "server",
        "reject a max_tokens for which the context has no room, also in chats, responses and "
        "messages; by default it is an upper bound there",
    )
    allowed_host: tuple[str, ...] = setting(
        (),
        "access",
        "host names that requests without an API key may name in Host, separated by commas; *: "
        "all; default: local names if --host is a loopback address, else all",
        "HOSTS",
    )
    page: bool = setting(
        True, "access", "serve the web page at /: a chat and a live view of the engine"
    )
    cors_origin: tuple[str, ...] = setting(
        (),
        "access",
        "origins whose web pages may call the server, separated by commas; *: all",
        "ORIGINS",
    )
    tls_cert: Path | None = setting(
        None, "access", "a PEM file with the certificate chain; read again on SIGHUP", "FILE"
    )
    tls_key: Path | None = setting(
        None, "access", "a PEM file with the certificate's private key", "FILE"
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key are used together: give both or neither")


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where files, batches and responses are kept, and how much of them."""

    store: str | None = setting(
        None,
        "server",
        "SQLite file for files, batches and responses; memory: keep nothing after the end; "
        "default: one file per model in the user's state directory",
        "FILE",
    )
    max_file_bytes: int = advanced(
        200 << 20, "server", "maximum size of an uploaded file", "SIZE", unit="bytes", ge=1
    )
    max_key_bytes: int = advanced(
        4 << 30,
        "server",
        "maximum size of the files and batches of one API key; without keys, of all clients",
        "SIZE",
        unit="bytes",
        ge=1,
    )
    max_store_bytes: int = advanced(
        16 << 30,
        "server",
        "maximum size of all stored files, batches and responses",
        "SIZE",
        unit="bytes",
        ge=1,
    )


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How much of the streams that clients can read again is held in memory."""

    max_key_replay_bytes: int = advanced(
        64 << 20,
        "server",
        "maximum size of the events that are held for one API key to be read again; without keys, "
        "for all clients",
        "SIZE",
        unit="bytes",
        ge=1,
    )
    max_replay_bytes: int = advanced(
        256 << 20,
        "server",
        "maximum size of all events that are held to be read again",
        "SIZE",
        unit="bytes",
        ge=1,
    )
    replay_seconds: float = advanced(
        600.0,
        "server",
        "time for which the events of a stream that has ended can be read again",
        "SECONDS",
        ge=0,
    )


@dataclass(frozen=True, slots=True)
class ObserveSettings:
    """Logs, traces, recordings and events of the server."""

    log_level: str = setting(
        "info",
        "server",
        "lowest level of the lines that are logged",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = setting(
        "text",
        "server",
        "format of the log on stderr; json: one object per line",
        choices=("text", "json"),
    )
    otlp_endpoint: str | None = secret(  # its URL may have a password
        None,
        "server",
        "export traces and metrics to this OpenTelemetry collector (OTLP over HTTP)",
        "URL",
    )
    kv_events_config: KVEventsConfig = advanced(
        KVEventsConfig(),
        "server",
        "publish which prefixes are cached, for routers, over ZeroMQ; a JSON object with vLLM's "
        "fields enable_kv_cache_events, endpoint, replay_endpoint, topic, buffer_steps, hwm, "
        "max_queue_size",
        "JSON",
        convert=check_config,
    )
    record: Path | None = setting(
        None,
        "server",
        "record arrivals and iterations, without texts, for podway simulate --replay",
        "FILE",
    )
    config: Path | None = setting(
        None,
        "server",
        f"a TOML file with these settings; {LOCAL_FILE} in the current directory is always read",
        "FILE",
    )


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may use the server, and how much."""

    api_key: tuple[str, ...] = secret(
        (),
        "access",
        "API keys that clients must send, separated by commas, each KEY or NAME=KEY; "
        "default: no key is required",
        "KEYS",
    )
    api_key_file: Path | None = setting(
        None, "access", "a TOML file of keys with limits per key; read again on SIGHUP", "FILE"
    )
    admin_api_key: tuple[str, ...] = secret(
        (),
        "access",
        "API keys that may also use /admin, written as in --api-key; without one, /admin needs a "
        "key of the key file with admin = true, or on a server without keys a client on the same "
        "machine",
        "KEYS",
    )
    prefix_isolation: str = setting(
        "key",
        "access",
        "key: requests share cached prefixes only with requests of the same API key, so that "
        "cached_tokens and TTFT do not reveal other keys' prompts; a common system prompt is then "
        "computed and stored once per key; off: all keys share them",
        choices=("key", "off"),
    )
    requests_per_minute: int = setting(
        0, "access", "limit per key, unless the key file sets another; 0: no limit", "N", ge=0
    )
    tokens_per_minute: int = setting(
        0,
        "access",
        "limit per key on prompt and output tokens, unless the key file sets another; 0: no limit",
        "TOKENS",
        ge=0,
    )
    max_concurrent: int = setting(
        0,
        "access",
        "limit per key on requests at the same time, unless the key file sets another; 0: no limit",
        "N",
        ge=0,
    )
