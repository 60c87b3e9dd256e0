"""Checks of the settings that need no model: they run before anything is loaded.

A wrong name or a file that cannot be written is then reported at once, not after minutes of
loading a checkpoint.
"""

import importlib
import os
from collections.abc import Collection
from pathlib import Path

from engine.errors import StartupError
from gateway.settings.flags import did_you_mean
from gateway.settings.settings import Settings

# Settings whose values are names in an adapter's table, and the names besides those.
NAMED = {
    "attention": ("adapters.attention:BACKENDS", ("auto",)),
    "tool_dialect": ("adapters.dialects.choosing:TOOL_STYLES", ("auto", "none")),
    "reasoning_dialect": ("adapters.dialects.choosing:REASONING_MARKS", ("auto", "none")),
}
WRITTEN = ("record", "trace")


def check_settings(settings: Settings) -> None:
    """Raise `StartupError` that names the first flag whose value cannot work."""
    for name, (table, others) in NAMED.items():
        module, _, attribute = table.partition(":")
        known = (*others, *getattr(importlib.import_module(module), attribute))
        _check_name(_flag(name), getattr(settings, name), known)
    for name in WRITTEN:
        path: Path | None = getattr(settings, name)
        if path is not None:
            _check_writable(_flag(name), path)
    if settings.record is not None and settings.speculative_config:
        raise StartupError(
            "--record cannot be used with --speculative-config: recordings have no drafts"
        )
    if len(settings.lora) > settings.max_loras:
        raise StartupError(
            f"--lora names {len(settings.lora)} adapters, and --max-loras allows "
            f"{settings.max_loras}"
        )
    if settings.chat_template is not None and not settings.chat_template.is_file():
        raise StartupError(f"--chat-template: there is no file {settings.chat_template}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_name(flag: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        nearest = did_you_mean(name, known)
        raise StartupError(f"{flag} must be one of {', '.join(known)}, not {name!r}{nearest}")


def _check_writable(flag: str, path: Path) -> None:
    path = path.expanduser()
    if not path.parent.is_dir():
        raise StartupError(f"{flag}: directory {path.parent} does not exist")
    if path.is_dir():
        raise StartupError(f"{flag}: {path} is a directory, not a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StartupError(f"{flag}: {path} cannot be written")
