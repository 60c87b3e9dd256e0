"""`WorkerSettings` from the names of settings alone, whichever of their sections has them."""

from dataclasses import fields, replace
from typing import Any

from engine.worker_settings import WorkerSettings

SECTIONS = ("kernels", "kv", "tiers")


def worker_settings(model: str = "", **values: object) -> WorkerSettings:
    """The defaults with other values, such as `threads=1` for `kernels.threads`."""
    return changed(WorkerSettings(model), **values)


def changed(settings: WorkerSettings, **values: Any) -> WorkerSettings:
    """The settings with other values."""
    for name in SECTIONS:
        section = getattr(settings, name)
        own = {each.name: values.pop(each.name) for each in fields(section) if each.name in values}
        values[name] = replace(values.get(name, section), **own)
    return replace(settings, **values)
