"""Question: one question of a decision request, as the model reads it, and its answer."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import orjson

from gateway.schema.decoding import invalid

MAX_QUESTIONS = 400
CHOICES = (2, 255)
LEVELS = (2, 10)
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 10_000
MAX_JSON_BYTES = 256 << 10


class Kind(StrEnum):
    """What is asked."""

    PREDICATE = "predicate"  # whether a statement is true
    CHOICE = "choice"  # one of several options
    SCORE = "score"  # a level of an ordered scale


class Option(NamedTuple):
    """A possible answer: its value in the response, and how it is named and described to the
    model; "" for no description."""

    value: str | bool | int
    name: str
    description: str = ""

    @property
    def line(self) -> str:
        """The option as the model reads it behind its label."""
        return f"{self.name}: {self.description}" if self.description else self.name


class Question(NamedTuple):
    """A question; errors name its `field`. The options of a predicate are yes and no."""

    kind: Kind
    instructions: str
    options: tuple[Option, ...]
    field: str
    name: str | None = None

    def text(self, labels: Sequence[str]) -> str:
        """The question with its options under these labels, which are the possible answers."""
        lines = [f"{label}. {option.line}" for label, option in self._listed(labels)]
        match self.kind:
            case Kind.PREDICATE:
                lines = [f"Is this statement true? {self.instructions}", *lines]
                lines.append(f"Answer with {labels[0]} or {labels[1]} only.")
            case Kind.CHOICE:
                lines = [f"Question: {self.instructions}", *lines]
                lines.append("Answer with the label of the best option only.")
            case Kind.SCORE:
                lines = [f"Question: {self.instructions}", *lines]
                lines.append("Answer with the number of the best level only.")
        return "\n".join(lines)

    def _listed(self, labels: Sequence[str]) -> list[tuple[str, Option]]:
        """The options that the question lists: of a predicate those with a description."""
        rows = zip(labels, self.options, strict=True)
        if self.kind is Kind.PREDICATE:
            return [(label, one._replace(name=one.description, description=""))
                    for label, one in rows if one.description]  # fmt: skip
        return list(rows)


class Answer(NamedTuple):
    """The probability of each option, 1 together; `label_mass` is what the model gives to all of
    their labels, of all that it could write."""

    probabilities: tuple[float, ...]
    label_mass: float

    @property
    def best(self) -> int:
        """The place of the most likely option."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def confidence(self) -> float:
        """1 if one option has all of the probability, 0 if all have the same."""
        count = len(self.probabilities)
        return max(0.0, (count * max(self.probabilities) - 1) / (count - 1))

    @property
    def level(self) -> float:
        """The mean of the options' places."""
        return sum(place * each for place, each in enumerate(self.probabilities))


def check_options(names: Sequence[object], path: str, bounds: tuple[int, int]) -> None:
    """Raise `InvalidRequest` for too few or too many options, and for one that occurs twice. A
    string and a boolean with the same text are different."""
    least, most = bounds
    if not least <= len(names) <= most:
        raise invalid(path, f"expected {least} to {most} items, but got {len(names)}.")
    if len({(type(name), name) for name in names}) < len(names):
        raise invalid(path, "every item must be different.")


def check_text(text: str, path: str) -> str:
    """The text; raises `InvalidRequest` if it is blank."""
    if not text.strip():
        raise invalid(path, "expected a text that is not blank.")
    return text


def json_text(data: object, path: str) -> str:
    """JSON as compact text. Raises `InvalidRequest` for a value that is too deep or too large."""
    num_values = _count(data, path)
    encoded = b"" if num_values > MAX_JSON_VALUES else orjson.dumps(data)
    if num_values > MAX_JSON_VALUES or len(encoded) > MAX_JSON_BYTES:
        raise invalid(
            path,
            f"at most {MAX_JSON_VALUES} values and {MAX_JSON_BYTES} bytes of JSON are allowed.",
        )
    return encoded.decode()


def _count(data: object, path: str) -> int:
    """The number of values, level by level; no more than one level beyond `MAX_JSON_VALUES`."""
    level: list[Any] = [data]
    num_values = depth = 0
    while level and num_values <= MAX_JSON_VALUES:
        num_values += len(level)
        nested = [each for each in level if isinstance(each, dict | list)]
        depth += bool(nested)
        if depth > MAX_JSON_DEPTH:
            raise invalid(
                path, f"at most {MAX_JSON_DEPTH} levels of arrays and objects are allowed."
            )
        rows = [each.values() if isinstance(each, dict) else each for each in nested]
        level = [inner for row in rows for inner in row]
    return num_values
