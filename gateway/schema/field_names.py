"""Error messages of a converted request, with the field names of the request that was sent.

Responses and Messages requests are converted to chat requests; an error that names a chat field is
changed to name the field that the caller used.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from engine.errors import InvalidRequest

T = TypeVar("T")


def with_renamed_fields(make: Callable[[], T], names: Mapping[str, str]) -> T:
    """Return `make()`. `names` maps chat fields to the caller's; an error is renamed by it."""
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
    for chat_name, name in names.items():
        if param == chat_name or param.startswith((f"{chat_name}.", f"{chat_name}[")):
            return name + param[len(chat_name) :]
    return param
