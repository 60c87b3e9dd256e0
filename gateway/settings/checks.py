"""Checks of the settings that need no model: they run before anything is loaded.

A wrong name or a file that cannot be written is then reported at once, not after minutes of
loading a checkpoint. Formats of the device are checked without asking torch.
"""

import ctypes
import importlib
import os
from pathlib import Path

from engine.errors import StartupError
from gateway.settings.flags import did_you_mean
from gateway.settings.settings import Settings

BACKENDS = "adapters.attention:BACKENDS"
TOOL_STYLES = "adapters.dialects.choosing:TOOL_STYLES"
REASONING_MARKS = "adapters.dialects.choosing:REASONING_MARKS"
DRIVER = "libcuda.so.1"
# What a CPU computes in, by setting; a test holds the table to the device.
ON_CPU = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "weights": ("auto", "float32", "int8", "int4"),
    "kv_cache_dtype": ("auto", "float32", "float16", "bfloat16", "int8"),
}


def check_settings(settings: Settings) -> None:
    """Raise `StartupError` that names the first flag whose value cannot work."""
    model, observe = settings.model, settings.observe
    _check_name("--attention", settings.kernels.attention, BACKENDS, "auto")
    _check_name("--tool-dialect", model.tool_dialect, TOOL_STYLES, "auto", "none")
    _check_name("--reasoning-dialect", model.reasoning_dialect, REASONING_MARKS, "auto", "none")
    _check_writable("--record", observe.record)
    _check_writable("--trace", settings.launch.trace)
    if observe.record is not None and model.speculative_config is not None:
        raise StartupError(
            "--record cannot be used with --speculative-config: recordings have no drafts"
        )
    _check_replicas(settings)
    if len(settings.loras.lora) > settings.loras.max_loras:
        raise StartupError(
            f"--lora names {len(settings.loras.lora)} adapters, and --max-loras allows "
            f"{settings.loras.max_loras}"
        )
    if model.chat_template is not None and not model.chat_template.is_file():
        raise StartupError(f"--chat-template: there is no file {model.chat_template}")


def _check_replicas(settings: Settings) -> None:
    """NUMA nodes are those of this machine, and some files are of one scheduler."""
    if settings.launch.replicas == 1:
        return
    observe, counts_nodes = settings.observe, settings.launch.replicas == 0
    for flag, is_given in (
        ("--device cuda", counts_nodes and settings.kernels.device.startswith("cuda")),
        ("--launcher ray", counts_nodes and settings.launch.launcher != "local"),
        ("--record", observe.record is not None),
        ("--trace", settings.launch.trace is not None),
        ("--kv-events-config", observe.kv_events_config.is_published),
    ):
        if is_given:
            raise StartupError(f"--replicas {settings.launch.replicas} cannot be used with {flag}")


def check_models(settings: Settings) -> None:
    """Raise `StartupError` for a setting of the server that several models cannot share."""
    if len(settings.deployments) == 1:
        return
    observe = settings.observe
    for flag, is_given in (
        ("--record", observe.record is not None),
        ("--otlp-endpoint", observe.otlp_endpoint is not None),
        ("--kv-events-config", observe.kv_events_config.is_published),
        ("--trace", any(each.launch.trace is not None for each in settings.deployments)),
    ):
        if is_given:
            raise StartupError(f"{flag} is for a server of one model, and this one has several")


def _check_name(flag: str, name: str, table: str, *others: str) -> None:
    """The name must be in the table, given as "module:name", or one of the others."""
    module, _, attribute = table.partition(":")
    known = (*others, *getattr(importlib.import_module(module), attribute))
    if name not in known:
        nearest = did_you_mean(name, known)
        raise StartupError(f"{flag} must be one of {', '.join(known)}, not {name!r}{nearest}")


def _check_writable(flag: str, path: Path | None) -> None:
    if path is None:
        return
    path = path.expanduser()
    if not path.parent.is_dir():
        raise StartupError(f"{flag}: directory {path.parent} does not exist")
    if path.is_dir():
        raise StartupError(f"{flag}: {path} is a directory, not a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StartupError(f"{flag}: {path} cannot be written")


def check_device(settings: Settings) -> None:
    """Raise `StartupError` if the device is not there, or a format is not one of a CPU's."""
    kernels = settings.kernels
    if settings.launch.launcher != "local":
        return  # the workers run on other machines
    if kernels.device.startswith("cuda") and not has_driver():
        raise StartupError(
            f"--device {kernels.device!r} cannot be used: there is no NVIDIA driver: {DRIVER} "
            "cannot be loaded"
        )
    if kernels.device != "cpu" and has_driver():
        return
    given = {
        "dtype": kernels.dtype,
        "weights": kernels.weights,
        "kv_cache_dtype": settings.kv.kv_cache_dtype,
    }
    for name, value in given.items():
        if value not in ON_CPU[name]:
            known = ", ".join(ON_CPU[name])
            flag = "--" + name.replace("_", "-")
            raise StartupError(f"{flag} {value!r} is not supported on cpu; known: {known}")
    if kernels.batch_invariant:
        raise StartupError("--batch-invariant is not supported on cpu, only on cuda")


def has_driver() -> bool:
    """Whether NVIDIA's driver is installed."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True
