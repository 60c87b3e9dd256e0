"""Error messages of a converted request, with the field names of the request that was sent.

Responses and Messages requests are converted to chat requests; an error that names a chat field is
changed to name the field that the caller used.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from engine.errors import InvalidRequest


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field of an `InvalidRequest` that the block raises, in message and `param`."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is not None:
            param = renamed(error.param, names)
            error.args = (str(error).replace(f"'{error.param}", f"'{param}"),)
            error.param = param
        raise


def renamed(param: str, names: Mapping[str, str]) -> str:
    """The field that a converted request has under the name `param`."""
    if param.startswith("tools["):
        schema = names.get("parameters", "parameters")
        return param.replace("].function.", "].").replace("].parameters", f"].{schema}")
    for chat_name, name in names.items():
        if param == chat_name or param.startswith((f"{chat_name}.", f"{chat_name}[")):
            return name + param[len(chat_name) :]
    return param
