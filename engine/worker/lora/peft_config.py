"""adapter_config.json, as PEFT's `save_pretrained` writes it.

Only plain LoRA is supported: whatever changes the result beyond `B A x` is rejected by its field's
name. Fields that only matter for training are ignored.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import TypeVar

from engine.errors import StartupError

T = TypeVar("T")
CONFIG_FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
# Fields that must be absent or have one of these values, and what they stand for.
_REJECTED: dict[str, tuple[str, tuple[object, ...]]] = {
    "use_dora": ("DoRA", (None, False)),
    "bias": ("trained biases", (None, "none")),
    "lora_bias": ("a bias of lora_B", (None, False)),
    "modules_to_save": ("whole modules beside LoRA", (None, [])),
    "trainable_token_indices": ("trained token embeddings", (None, [])),
    "target_parameters": ("LoRA on parameters that are not linears", (None, [])),
    "layer_replication": ("repeated layers", (None, [])),
    "use_qalora": ("QALoRA", (None, False)),
    "use_bdlora": ("block-diagonal LoRA", (None, False)),
    "alora_invocation_tokens": ("activated LoRA", (None, [])),
    "arrow_config": ("Arrow routing", (None,)),
    "kasa_config": ("KaSA", (None,)),
    "monteclora_config": ("MonteCLoRA", (None,)),
}
# Initializations that also change the weights of the base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks, scales and targets of an adapter. `rank_pattern` and `alpha_pattern` have regular
    expressions for the ends of module names, of which the first that matches counts."""

    rank: int
    alpha: float
    uses_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    targets: str | Sequence[str]  # a regular expression, or names and ends of names
    excluded: str | Sequence[str] = ()
    layers: Sequence[int] | None = None  # None: all
    layer_names: Sequence[str] = field(default=())  # what the numbers of layers follow

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> "PeftConfig":
        """Raises `StartupError` naming the field that is wrong or not supported."""
        fields = _Fields(config)
        if config.get("peft_type") != "LORA":
            raise fields.error("peft_type", "only 'LORA' is supported")
        for name, (what, allowed) in _REJECTED.items():
            if config.get(name) not in allowed:
                raise fields.error(name, f"{what} cannot be served")
        how = config.get("init_lora_weights")
        if isinstance(how, str) and how.lower().startswith(_CHANGES_BASE):
            raise fields.error("init_lora_weights", "it changes the weights of the base model")
        layers = config.get("layers_to_transform")
        return cls(
            rank=fields.integer("r"),
            alpha=fields.number(config.get("lora_alpha"), "lora_alpha"),
            uses_rslora=config.get("use_rslora") is True,
            rank_pattern={key: int(value) for key, value in fields.pattern("rank_pattern")},
            alpha_pattern=dict(fields.pattern("alpha_pattern")),
            targets=fields.names("target_modules", is_required=True),
            excluded=fields.names("exclude_modules"),
            layers=[layers] if isinstance(layers, int) else fields.integers("layers_to_transform"),
            layer_names=_listed(fields.names("layers_pattern")),
        )

    def rank_of(self, module: str) -> int:
        """The rank of a module's LoRA."""
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What `B A x` is multiplied by: alpha / r, or alpha / sqrt(r) for rsLoRA (Kalajdzievski,
        2023)."""
        rank = self.rank_of(module)
        return _matching(self.alpha_pattern, module, self.alpha) / (
            sqrt(rank) if self.uses_rslora else rank
        )

    @property
    def targets_all(self) -> bool:
        """Whether the targets are all modules of PyTorch's class for linears."""
        return isinstance(self.targets, str) and self.targets.lower() == ALL_LINEAR

    def targets_module(self, module: str) -> bool:
        """Whether PEFT gives this linear of the blocks a LoRA."""
        if _names_module(self.excluded, module):
            return False
        if self.targets_all:
            return True
        if not _names_module(self.targets, module):
            return False
        return isinstance(self.targets, str) or not self.layers or self._has_layer(module)

    def _has_layer(self, module: str) -> bool:
        patterns = [rf"(?:^|.*?\.){name}\.(\d+)\." for name in self.layer_names]
        for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."]:
            if (match := re.match(pattern, module)) is not None:
                return int(match[1]) in (self.layers or ())
        return False


@dataclass(frozen=True, slots=True)
class _Fields:
    """Typed access to the JSON object."""

    values: Mapping[str, object]

    def error(self, name: str, why: str) -> StartupError:
        shown = (
            f"{name}={self.values[name]!r}"[:200] if name in self.values else f"{name} is missing"
        )
        return StartupError(f"{CONFIG_FILE}: {shown}: {why}")

    def integer(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "expected a positive integer")
        return value

    def number(self, value: object, name: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(name, "expected a positive number")
        return float(value)

    def integers(self, name: str) -> list[int] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise self.error(name, "expected numbers of layers")
        return value

    def names(self, name: str, *, is_required: bool = False) -> str | list[str]:
        value = self.values.get(name)
        if value is None and not is_required:
            return []
        if isinstance(value, str) and value.lower() != ALL_LINEAR:
            self._check_pattern(name, value)
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.error(name, "expected names of modules, or a regular expression")
        return value

    def pattern(self, name: str) -> list[tuple[str, float]]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, dict):
            raise self.error(name, "expected an object")
        for key in value:
            self._check_pattern(name, key)
        return [(key, self.number(each, name)) for key, each in value.items()]

    def _check_pattern(self, name: str, pattern: str) -> None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise self.error(name, f"{pattern!r} is not a regular expression: {error}") from error


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def _names_module(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _matching(values: Mapping[str, T], module: str, default: T) -> T:
    for pattern, value in values.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
