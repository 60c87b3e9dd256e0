"""Settings of API keys and of the limits per key."""

from dataclasses import dataclass
from pathlib import Path

from engine.setting import secret, setting


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
