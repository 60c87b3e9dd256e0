"""Strict access to config.json: invalid types and values raise errors that name the field."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import StartupError

# Those that every device has; a test holds them to the operators in torch.
ACTIVATIONS = ("silu", "swish", "relu", "relu2", "gelu", "gelu_new", "gelu_pytorch_tanh")
MAX_LAYERS = 10_000  # models have some hundred at most


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a JSON object; `where` is its path, for error messages."""

    values: Mapping[str, object]
    where: str = "config.json"

    def _wrong(self, name: str, wanted: str) -> StartupError:
        found = f"is {self.values[name]!r}" if name in self.values else "is missing"
        return StartupError(f"{self.where}: {name} {found}, expected {wanted}")

    def get(self, name: str) -> object:
        """The raw value; None if absent or null."""
        return self.values.get(name)

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; null counts as absent."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, "a positive integer")
        return value

    def layers(self, name: str) -> int:
        """A number of layers, bounded so that a wrong one is refused before any is built."""
        value = self.integer(name)
        if value > MAX_LAYERS:
            raise self._wrong(name, f"at most {MAX_LAYERS:,}")
        return value

    def count(self, name: str, default: int) -> int:
        """An integer from 0; null counts as absent."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, "an integer from 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; null counts as absent."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(name, "a positive number")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A positive number; None if absent or null."""
        return None if self.get(name) is None else self.number(name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(name, f"{count} numbers")
        if any(isinstance(one, bool) or not isinstance(one, int | float) for one in value):
            raise self._wrong(name, f"{count} numbers")
        if not all(one > 0 for one in value):
            raise self._wrong(name, f"{count} positive numbers")
        return tuple(map(float, value))

    def counts(self, name: str, count: int) -> tuple[int, ...]:
        """A list of `count` integers from 0."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(name, f"{count} integers")
        if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in value):
            raise self._wrong(name, f"{count} integers from 0")
        return tuple(map(int, value))

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null counts as absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def reject_unless(self, name: str, *supported: object) -> None:
        """Raise `StartupError` unless the value is absent, null or one of `supported`."""
        value = self.get(name)
        if value is not None and value not in supported:
            only = f"; only {supported[0]!r} is" if supported else ""
            raise StartupError(f"{self.where}: {name}={value!r} is not supported{only}")

    def activation(self, name: str, default: str) -> str:
        """The name of a supported activation function."""
        value = self.get(name) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise StartupError(f"{self.where}: activation {name}={value!r} is not supported")
        return value

    def child(self, name: str) -> "Fields | None":
        """The JSON object in a field; None if absent or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{self.where}: {name}")
