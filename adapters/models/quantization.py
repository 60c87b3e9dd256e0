"""`quantization_config` of config.json: which checkpoints of 8-bit weights are served.

It is what `compressed-tensors` writes and vLLM reads as W8A8: int8 weights with a scale for each
output channel, activations rounded while serving. Every other choice is refused by its name.
"""

from collections.abc import Mapping

from adapters.models.fields import Fields
from engine.errors import StartupError

FORMATS = ("int-quantized",)


def has_rounded_weights(config: Mapping[str, object]) -> bool:
    """Whether linears are stored in 8 bits; raises `StartupError` for any other scheme."""
    scheme = Fields(config).child("quantization_config")
    if scheme is None:
        return False
    _only(scheme, "quant_method", "compressed-tensors")
    _only(scheme, "format", *FORMATS)
    _only(scheme, "quantization_status", "compressed", None)
    scheme.refuse("kv_cache_scheme")
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
    _only(group, "format", *FORMATS, None)
    group.refuse("output_activations")
    weights, inputs = group.child("weights"), group.child("input_activations")
    if weights is None or inputs is None:
        missing = "weights" if weights is None else "input_activations"
        raise StartupError(f"{group.where}: {missing} is missing, expected 8-bit integers")
    for side, strategy, is_dynamic in ((weights, "channel", False), (inputs, "token", True)):
        _only(side, "num_bits", 8)
        _only(side, "type", "int")
        _only(side, "symmetric", True)
        _only(side, "strategy", strategy)
        _only(side, "dynamic", is_dynamic, *(() if is_dynamic else (None,)))
        _only(side, "group_size", None)
        _only(side, "block_structure", None)
        _only(side, "actorder", None)


def _only(fields: Fields, name: str, *served: object) -> None:
    """Refuse any value but these; None: absent or null will do."""
    value = fields.get(name)
    if not any(value == one and type(value) is type(one) for one in served):
        known = ", ".join(repr(one) for one in served)
        raise StartupError(f"{fields.where}: {name}={value!r} is not supported; known: {known}")
