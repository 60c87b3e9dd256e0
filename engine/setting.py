"""How settings are declared: as fields of frozen dataclasses, with what flags need beside a value.

The settings of a feature are one dataclass, which the server, the workers, recordings and the
simulator share. A field made by `setting` is also a flag `--name`, a variable `PODWAY_NAME` and a
key of settings files (`gateway.options`); other fields are only for code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypedDict, TypeVar, Unpack

T = TypeVar("T")
SETTING = "setting"  # key in the metadata of a field


class Declared(TypedDict, total=False):
    """What `Setting` has besides group, help and metavar."""

    name: str
    choices: tuple[str, ...]
    unit: Literal["", "bytes", "seconds"]
    ge: float | None
    gt: float | None
    le: float | None
    zero: float | None
    convert: Callable[[object], object] | None
    check: Callable[..., object] | None


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of a settings class as users see it.

    `group` is its heading in the help. `name` is used instead of the field's name. A value is one
    of `choices` if there are any, has the `unit`, is at least `ge`, above `gt` and at most `le`;
    `zero` is the value that 0 stands for. `convert` makes the value from text or from the value in
    a file, and replaces all of that; `check` looks at a value that has the field's type. Both raise
    `ValueError` with the rest of a sentence that begins with the flag.
    """

    group: str
    help: str
    metavar: str = ""
    name: str = ""
    choices: tuple[str, ...] = ()
    unit: Literal["", "bytes", "seconds"] = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    zero: float | None = None
    convert: Callable[[object], object] | None = None
    check: Callable[..., object] | None = None
    is_advanced: bool = False
    is_secret: bool = False


def setting(
    default: T, group: str, help: str, metavar: str = "", **declared: Unpack[Declared]
) -> T:
    """A field of a settings class that users can set; the type is the default's for mypy."""
    described = Setting(group, help, metavar, **declared)
    made: T = field(default=default, metadata={SETTING: described})
    return made


def advanced(
    default: T, group: str, help: str, metavar: str = "", **declared: Unpack[Declared]
) -> T:
    """A setting that only `--help-all` shows."""
    described = Setting(group, help, metavar, **declared, is_advanced=True)
    made: T = field(default=default, metadata={SETTING: described})
    return made


def secret(default: T, group: str, help: str, metavar: str, **declared: Unpack[Declared]) -> T:
    """A setting that neither the representation of its class nor an error shows."""
    described = Setting(group, help, metavar, **declared, is_secret=True)
    made: T = field(default=default, repr=False, metadata={SETTING: described})
    return made


def duration(text: str) -> float:
    """Seconds from `50ms`, `0.05s`, `0.05`, `10m` or `2h`. Raises `ValueError` for another text."""
    number = text.strip()
    for unit, seconds in (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)):
        if number.endswith(unit):
            return round(float(number.removesuffix(unit)) * seconds, 9)
    return float(number)
