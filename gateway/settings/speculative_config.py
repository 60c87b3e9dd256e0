"""`--speculative-config`: a JSON object with the keys of vLLM's flag."""

import json

from engine.errors import StartupError
from engine.speculation.settings import SpeculationSettings

FLAG = "--speculative-config"


def check_speculative_config(value: object) -> str:
    """The value of the flag as JSON text, "" for none; in a settings file it may be a table.

    Raises `ValueError` with a line that names the flag, and the key that is wrong.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    speculation_settings(text)
    return text


def speculation_settings(text: str) -> SpeculationSettings | None:
    """The settings that the text describes; None if speculation is off. Raises `ValueError`."""
    if not text:
        return None
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{FLAG} must be a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f'{FLAG} must be a JSON object such as {{"method": "ngram"}}')
    try:
        return SpeculationSettings.parse(given)
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None


def check_device(text: str, device: str) -> None:
    """Raise `StartupError` if speculation is on and the model does not run on the CPU."""
    if text and not device.startswith("cpu"):
        raise StartupError(f"{FLAG} is supported on the CPU; this model runs on {device}")
