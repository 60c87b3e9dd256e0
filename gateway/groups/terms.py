"""Terms: when a model is loaded and unloaded, and its part of the machine beside other models."""

from dataclasses import dataclass

from engine.setting import advanced, setting


@dataclass(frozen=True, slots=True)
class Terms:
    """When one of several models is loaded and unloaded, and its share of the cores."""

    autoload: bool = advanced(
        True, "models", "load the model when a request names it; without it, only /models/load does"
    )
    pinned: bool = advanced(
        False,
        "models",
        "load the model at the start, and never unload it to make room or because it is idle; a "
        "single model is loaded at the start in any case",
    )
    idle_unload: float | None = advanced(
        None,
        "models",
        "unload the model when it has had no request for so long, for instance 10m; default: never",
        "SECONDS",
        unit="seconds",
        gt=0,
    )
    share: float = advanced(
        1.0,
        "models",
        "the model's share of the cores while other models compute, too; 2 is twice that of 1",
        "SHARE",
        gt=0,
        le=1000,
    )
    priority: int = advanced(
        0,
        "models",
        "models of a lower priority are unloaded first when another one needs their memory",
        "N",
    )


@dataclass(frozen=True, slots=True)
class ServerTerms:
    """What the models of a server have in common: their memory, and the wait for one to load."""

    memory: int = setting(
        0,
        "models",
        "memory for weights, KV cache and states of all loaded models, for instance 16GiB; models "
        "are unloaded to make room for others; 0: three quarters of what is available at the "
        "start, if there are several models",
        "SIZE",
        unit="bytes",
        ge=0,
    )
    max_load_wait: float = advanced(
        60.0,
        "models",
        "how long a request waits for its model to be loaded; one that would probably wait longer "
        "gets a 503 with retry-after",
        "SECONDS",
        unit="seconds",
        ge=0,
    )
