"""Options: a field of a settings class as a flag, an environment variable and a line of help.

One parser reads the values of flags, variables and settings files, of `podway simulate`, and of
the endpoints that change settings.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ByteSize, ConfigDict, TypeAdapter

from engine.setting import SETTING, Setting, duration

S = TypeVar("S")
SWITCH = ("true", "false")
PREFIX = "PODWAY_"


class _Refused(Exception):
    """A value has another type, or is out of bounds."""


@dataclass(frozen=True)
class Option:
    """One setting: flag `--name`, variable `PODWAY_NAME`, default and allowed values.

    `field` is the field's name in its class, `kind` its type without `| None`. `section` is where
    the server's settings hold the class.
    """

    section: str
    field: str
    kind: Any
    default: object
    declared: Setting

    @property
    def name(self) -> str:
        return self.declared.name or self.field

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def label(self) -> str:
        """The setting's name in error messages."""
        return self.declared.metavar if self.name == "model" else self.flag

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value: `--name` or `--no-name`."""
        return self.kind is bool

    @property
    def has_several(self) -> bool:
        """Whether it has several values, separated by commas: its flag may be repeated."""
        return get_origin(self.kind) is tuple

    @property
    def metavar(self) -> str:
        return self.declared.metavar or "{" + ",".join(self.choices) + "}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The names that the value is one of; empty for numbers and texts."""
        if self.is_switch:
            return SWITCH
        if isinstance(self.kind, type) and issubclass(self.kind, Enum):
            return tuple(str(member.value) for member in self.kind)
        return self.declared.choices

    @property
    def default_text(self) -> str:
        """The default as a user would write it; "" if there is none."""
        value = self.default
        if value is None or value == ():
            return ""
        if value == self.declared.zero:
            return "0"
        if isinstance(value, bool):
            return SWITCH[not value]
        if isinstance(value, Enum):
            return str(value.value)
        if self.declared.unit == "bytes":
            return ByteSize(int(str(value))).human_readable(separator="").replace(".0", "")
        return str(value)

    @property
    def allowed(self) -> str:
        """The allowed values in words, for error messages."""
        declared = self.declared
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if declared.unit == "seconds":
            return "a duration such as 50ms or 0.05s; 0 for none"
        if declared.unit == "bytes":
            return "a size such as 512MiB or 2GiB"
        noun = {int: "a whole number", float: "a number"}.get(self.kind, "text")
        if declared.gt is not None:
            limit = "" if declared.le is None else f", at most {declared.le:g}"
            return f"{noun} above {declared.gt:g}{limit}"
        if declared.ge is not None and declared.le is not None:
            return f"{noun} from {declared.ge:g} to {declared.le:g}"
        return noun if declared.ge is None else f"{noun}, at least {declared.ge:g}"

    def parse(self, value: object) -> Any:
        """The setting's value from text, or from a value with a type in a settings file or in JSON.

        Raises `ValueError` with a sentence that begins with `label`.
        """
        declared = self.declared
        try:
            if declared.convert is not None:
                return declared.convert(value)
            parsed = self._typed(value)
            if declared.check is not None:
                declared.check(parsed)
        except _Refused:
            given = "" if declared.is_secret else f", not {value!r}"
            raise ValueError(f"{self.label} must be {self.allowed}{given}") from None
        except ValueError as error:
            separator = "" if str(error).startswith(":") else " "
            raise ValueError(f"{self.label}{separator}{error}") from None
        if declared.unit == "bytes":
            return int(parsed)
        return declared.zero if declared.zero is not None and parsed == 0 else parsed

    def of_flag(self, text: str) -> Any:
        """The value of a flag, for argparse, which puts the flag before the error itself."""
        try:
            return self.parse(text)
        except ValueError as error:
            message = str(error).removeprefix(self.label).removeprefix(":")
            raise argparse.ArgumentTypeError(message.strip()) from None

    def _typed(self, value: object) -> Any:
        """The value with the type, within the bounds. Raises `_Refused`."""
        declared = self.declared
        if (isinstance(value, bool) and not self.is_switch) or "\0" in str(value):
            raise _Refused  # pydantic takes true for 1; no file's name has a NUL
        try:
            parsed = self._adapter.validate_python(self._plain(value))
        except ValueError:
            raise _Refused from None
        if self.has_several and "" in parsed:
            raise ValueError("has an empty value; several are separated by commas")
        if (
            (declared.choices and parsed not in declared.choices)
            or (declared.ge is not None and parsed < declared.ge)
            or (declared.gt is not None and parsed <= declared.gt)
            or (declared.le is not None and parsed > declared.le)
        ):
            raise _Refused
        return parsed

    def _plain(self, value: object) -> object:
        """The value as the parser of its type takes it. Raises `ValueError`."""
        if self.declared.unit == "seconds":
            return duration(value) if isinstance(value, str) else value
        if self.has_several:
            return split(value)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return str(value) if is_number and self.choices else value

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kind = ByteSize if self.declared.unit == "bytes" else self.kind
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def options_of(section: str, defaults: object, *names: str) -> list[Option]:
    """The options of a settings object, which has the defaults, in the order of its fields; with
    names of options, only those."""
    kinds = get_type_hints(type(defaults))
    options = [
        Option(section, each.name, _kind(kinds[each.name]), getattr(defaults, each.name), declared)
        for each in fields(defaults)  # type: ignore[arg-type] # it is a dataclass
        if (declared := each.metadata.get(SETTING)) is not None
    ]
    return [option for option in options if not names or option.name in names]


def with_values(defaults: S, values: Mapping[str, object]) -> S:
    """The settings with other values, by the names of fields. Raises `ValueError` if they do not
    fit together."""
    return replace(defaults, **values) if values else defaults  # type: ignore[type-var]


def add_flags(group: argparse._ActionsContainer, options: Sequence[Option]) -> None:
    """Add the flags of settings to a parser. A flag that is absent is None in the result."""
    for option in options:
        default = f" (default {option.default_text})" if option.default_text else ""
        text = option.declared.help + default
        if option.is_switch:
            action = argparse.BooleanOptionalAction
            group.add_argument(option.flag, action=action, default=None, help=text)
        else:
            group.add_argument(option.flag, type=option.of_flag, metavar=option.metavar, help=text)


def with_flags(defaults: S, args: argparse.Namespace) -> S:
    """The settings with the values of the flags that were given. Raises `ValueError` if they do not
    fit together."""
    values = {each.field: getattr(args, each.name, None) for each in options_of("", defaults)}
    return with_values(defaults, {k: value for k, value in values.items() if value is not None})


def split(value: object) -> object:
    """The values of a setting that has several: texts separated by commas, or a list of those."""
    if isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value):
        value = ",".join(value)  # from a repeated flag, or a file
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _kind(annotation: Any) -> Any:
    """The type without `| None`."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation
