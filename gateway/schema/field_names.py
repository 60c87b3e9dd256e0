"""Complaints of one endpoint's fields in the words of another, which put its request so."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from engine.errors import InvalidRequest

T = TypeVar("T")


def with_renamed_fields(make: Callable[[], T], names: Mapping[str, str]) -> T:
    """What `make` makes; its complaint names the field as our caller spelled it."""
    try:
        return make()
    except InvalidRequest as error:
        if error.param is None:
            raise
        param = _renamed(error.param, names)
        error.args = (str(error).replace(f"'{error.param}", f"'{param}"),)
        error.param = param
        raise


def _renamed(param: str, names: Mapping[str, str]) -> str:
    if param.startswith("tools["):
        return param.replace("].function.", "].")
    for name, ours in names.items():
        if param == name or param.startswith((f"{name}.", f"{name}[")):
            return ours + param[len(name) :]
    return param
