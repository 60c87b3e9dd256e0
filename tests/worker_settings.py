"""Settings and reports of workers, from what a test says of them."""

from dataclasses import fields, replace
from typing import Any

from engine.worker_settings import WorkerReport, WorkerSettings

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


def worker_report(**values: Any) -> WorkerReport:
    """A worker on a CPU with few blocks, with other values."""
    few: dict[str, Any] = {
        "architecture": "Demo", "num_parameters": 1, "dtype": "float32", "device": "cpu",
        "attention": "cpu", "vocab_size": 1000, "max_model_len": 64, "eos_token_ids": (0,),
        "num_blocks": 4, "block_size": 16, "bytes_per_block": 1, "threads": 1,
    }  # fmt: skip
    return WorkerReport(**few | values)
