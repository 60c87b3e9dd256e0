"""The defaults of sampling parameters: `generation_config.json`, and flags that override it."""

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidRequest, StartupError
from gateway.schema.decoding import check_minimum, check_range
from gateway.schema.fields.sampling import MINIMUMS, RANGES, SamplingDefaults

FLAG = "--override-generation-config"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def table_of(value: object, example: str) -> dict[str, Any]:
    """A JSON object as text, or a table of a settings file.

    Raises `ValueError` with the rest of a line that begins with the flag.
    """
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"must be a JSON object such as {example}")
    return given


def check_override(value: object) -> str:
    """The value of the flag as JSON text; in a settings file it may be a table.

    Raises `ValueError` with the rest of a line that begins with the flag.
    """
    given = table_of(value, '{"temperature": 0.6}')
    if unknown := [name for name in given if name not in FIELDS]:
        raise ValueError(f"has no field {unknown[0]!r}; it has {', '.join(FIELDS)}")
    try:
        _defaults(given)
    except StartupError as error:
        raise ValueError(f": {error}") from None
    return json.dumps(given)


def sampling_defaults(config: Mapping[str, object], override: str) -> SamplingDefaults:
    """The defaults of a checkpoint whose generation_config.json is `config`, with the flag's JSON.

    A null in the flag restores OpenAI's default. As in vLLM, `do_sample` and `max_new_tokens` of
    the file are not used. Raises `StartupError` for a value that no request may have.
    """
    given = {name: config[name] for name in FIELDS if config.get(name) is not None}
    try:
        _defaults(given)
    except StartupError as error:
        raise StartupError(f"generation_config.json: {error} ({FLAG} can replace it)") from None
    return _defaults(given | json.loads(override))


def _defaults(given: Mapping[str, object]) -> SamplingDefaults:
    values = {name: value for name, value in given.items() if value is not None}
    for name, value in values.items():
        is_number = isinstance(value, int if name == "top_k" else int | float)
        if not is_number or isinstance(value, bool):
            kind = "an integer" if name == "top_k" else "a number"
            raise StartupError(f"'{name}' must be {kind}, not {value!r}")
        try:
            if name in RANGES:
                check_range(value, name, *RANGES[name])  # type: ignore[arg-type] # a number
            else:
                check_minimum(value, name, MINIMUMS[name])  # type: ignore[arg-type] # an integer
        except InvalidRequest as error:
            raise StartupError(str(error).removesuffix(".")) from None
    return SamplingDefaults(**values)  # type: ignore[arg-type] # checked above
