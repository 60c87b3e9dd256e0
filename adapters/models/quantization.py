"""Checks `quantization_config` of config.json, which describes checkpoints of int8 weights.

The supported scheme is the one that `compressed-tensors` writes and vLLM calls W8A8: int8 weights
with one scale per output channel, activations quantized at run time. Every other scheme is
rejected with an error that names the field.
"""

from collections.abc import Mapping

from adapters.models.fields import Fields
from engine.errors import StartupError

FORMATS = ("int-quantized",)


def has_int8_weights(config: Mapping[str, object]) -> bool:
    """Whether linears are stored in 8 bits; raises `StartupError` for any other scheme."""
    scheme = Fields(config).child("quantization_config")
    if scheme is None:
        return False
    _require(scheme, "quant_method", "compressed-tensors")
    _require(scheme, "format", *FORMATS)
    _require(scheme, "quantization_status", "compressed", None)
    scheme.reject_unless("kv_cache_scheme")
    for name in ("sparsity_config", "transform_config"):
        if scheme.get(name) not in (None, {}):
            raise StartupError(f"{scheme.where}: {name} is not supported")
    groups = scheme.child("config_groups")
    if groups is None or not groups.values:
        raise StartupError(f"{scheme.where}: config_groups is missing")
    for name in groups.values:
        group = groups.child(name)
        if group is not None:
            _check_group(group)
    return True


def _check_group(group: Fields) -> None:
    targets = group.get("targets")
    if targets != ["Linear"]:
        raise StartupError(
            f"{group.where}: targets={targets!r} is not supported; only ['Linear'] is"
        )
    _require(group, "format", *FORMATS, None)
    group.reject_unless("output_activations")
    weights, inputs = group.child("weights"), group.child("input_activations")
    if weights is None or inputs is None:
        missing = "weights" if weights is None else "input_activations"
        raise StartupError(f"{group.where}: {missing} is missing, expected 8-bit integers")
    for side, strategy, is_dynamic in ((weights, "channel", False), (inputs, "token", True)):
        _require(side, "num_bits", 8)
        _require(side, "type", "int")
        _require(side, "symmetric", True)
        _require(side, "strategy", strategy)
        _require(side, "dynamic", is_dynamic, *(() if is_dynamic else (None,)))
        _require(side, "group_size", None)
        _require(side, "block_structure", None)
        _require(side, "actorder", None)


def _require(fields: Fields, name: str, *supported: object) -> None:
    """Raise `StartupError` unless the value is one of `supported`; None is absent or null."""
    value = fields.get(name)
    if not any(value == one and type(value) is type(one) for one in supported):
        known = ", ".join(repr(one) for one in supported)
        raise StartupError(f"{fields.where}: {name}={value!r} is not supported; known: {known}")
