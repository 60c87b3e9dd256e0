"""`--speculative-config`: a JSON object with the keys of vLLM's flag."""

import json

from engine.speculation.settings import SpeculationSettings

FLAG = "--speculative-config"


def speculation_settings(value: object) -> SpeculationSettings | None:
    """The settings that JSON text, or a table of a settings file, describes; "" for none.

    Raises `ValueError` with the rest of a line that begins with the flag.
    """
    if value == "":
        return None
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise ValueError('must be a JSON object such as {"method": "ngram"}')
    try:
        return SpeculationSettings.parse(given)
    except ValueError as error:
        raise ValueError(f": {error}") from None
