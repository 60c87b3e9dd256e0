"""Options: a field of the settings as a flag, an environment variable and a line of help."""

from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import ByteSize, Field
from pydantic.fields import FieldInfo

from gateway.settings.flags import duration

SWITCH = ("true", "false")
PREFIX = "PODWAY_"


def option(
    default: Any,
    group: str,
    description: str,
    metavar: str = "",
    *,
    ge: int | None = None,
    gt: int | None = None,
    le: int | None = None,
) -> Any:
    """A field that is also a flag of `podway serve`, listed under `group` in its help."""
    extra: dict[str, Any] = {"group": group, "metavar": metavar}
    return Field(default, description=description, json_schema_extra=extra, ge=ge, gt=gt, le=le)


def split(value: object) -> object:
    """A setting with several values, which flags and the environment separate by commas."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = ",".join(value)  # of a repeated flag, or of a file
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


class Option(NamedTuple):
    """One setting in the help: flag `--name`, variable `PODWAY_NAME`, default and choices."""

    name: str
    group: str
    metavar: str
    default: str
    description: str
    choices: tuple[str, ...]

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value: `--name` or `--no-name`."""
        return self.choices == SWITCH

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()


def as_option(name: str, info: FieldInfo) -> Option:
    """The option of a settings field."""
    extra = info.json_schema_extra
    assert isinstance(extra, dict), f"setting {name} is not an option()"
    default = "" if info.default in (None, ()) else str(info.default)
    if isinstance(info.default, bool):
        default = SWITCH[not info.default]
    if isinstance(info.default, ByteSize):
        default = info.default.human_readable(separator="").replace(".0", "")
    return Option(
        name=name,
        group=str(extra["group"]),
        metavar=str(extra["metavar"]),
        default=default,
        description=info.description or "",
        choices=_choices(info),
    )


def _kind(info: FieldInfo) -> Any:
    """The field's type without `| None`."""
    if get_origin(info.annotation) in (Union, UnionType):
        return next(arg for arg in get_args(info.annotation) if arg is not NoneType)
    return info.annotation


def _choices(info: FieldInfo) -> tuple[str, ...]:
    kind = _kind(info)
    if kind is bool:
        return SWITCH
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def allowed(info: FieldInfo) -> str:
    """The values that a field allows, in words, for error messages."""
    if choices := _choices(info):
        return "one of " + ", ".join(choices)
    if duration in (getattr(each, "func", None) for each in info.metadata):
        return "a duration such as 50ms or 0.05s; 0 for none"
    if _kind(info) is ByteSize:
        return "a size such as 512MiB or 2GiB"
    noun = {int: "a whole number", float: "a number"}.get(_kind(info), "text")
    bounds = {
        key: getattr(m, key) for m in info.metadata for key in ("ge", "gt", "le") if hasattr(m, key)
    }
    if "gt" in bounds and "le" in bounds:
        return f"{noun} above {bounds['gt']}, at most {bounds['le']}"
    if "gt" in bounds:
        return f"{noun} above {bounds['gt']}"
    if "ge" in bounds and "le" in bounds:
        return f"{noun} from {bounds['ge']} to {bounds['le']}"
    return f"{noun}, at least {bounds['ge']}" if "ge" in bounds else noun
