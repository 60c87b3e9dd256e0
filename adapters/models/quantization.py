"""Checks `quantization_config` of config.json, which describes checkpoints of integer weights.

Supported are W8A8 as `compressed-tensors` writes it (int8 weights, one scale per output channel,
activations quantized at run time), int4 weights with scales of groups: `compressed-tensors`'
`pack-quantized`, GPTQ and AWQ; and experts in MXFP4 (gpt-oss). Every other scheme is rejected with
an error that names the field.
"""

from collections.abc import Mapping

from adapters.models.base.fields import Fields
from engine.errors import StartupError

INT8, INT4 = "int-quantized", "pack-quantized"  # formats of compressed-tensors


def stored_scheme(config: Mapping[str, object]) -> str:
    """How linears are stored: "int8", "mxfp4", a key of `int4_files.SCHEMES`, or "" for floats.

    Raises `StartupError` for any other scheme.
    """
    scheme = Fields(config).child("quantization_config")
    if scheme is None:
        return ""
    _require(scheme, "quant_method", "compressed-tensors", "gptq", "awq", "mxfp4")
    method = scheme.get("quant_method")
    if method == "mxfp4":
        return "mxfp4"
    if method == "gptq":
        return _check_gptq(scheme)
    if method == "awq":
        return _check_awq(scheme)
    return _check_compressed_tensors(scheme)


def _check_gptq(scheme: Fields) -> str:
    _require(scheme, "bits", 4)
    _require(scheme, "desc_act", False, None)
    _require(scheme, "checkpoint_format", "gptq", "gptq_v2", None)
    _require(scheme, "pack_dtype", "int32", None)
    if scheme.get("dynamic") not in (None, {}):
        raise StartupError(f"{scheme.where}: dynamic is not supported")
    return "gptq_v2" if scheme.get("checkpoint_format") == "gptq_v2" else "gptq"


def _check_awq(scheme: Fields) -> str:
    _require(scheme, "bits", 4)
    _require(scheme, "version", "gemm", None)
    return "awq"


def _check_compressed_tensors(scheme: Fields) -> str:
    _require(scheme, "format", INT8, INT4)
    is_int8 = scheme.get("format") == INT8
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
            _check_targets(group, INT8 if is_int8 else INT4)
            (_check_int8 if is_int8 else _check_int4)(group)
    return "int8" if is_int8 else INT4


def _check_targets(group: Fields, stored: str) -> None:
    targets = group.get("targets")
    if targets != ["Linear"]:
        raise StartupError(
            f"{group.where}: targets={targets!r} is not supported; only ['Linear'] is"
        )
    _require(group, "format", stored, None)
    group.reject_unless("output_activations")


def _check_int4(group: Fields) -> None:
    """Sizes of groups and zero points are read from the tensors."""
    group.reject_unless("input_activations")
    weights = group.child("weights")
    if weights is None:
        raise StartupError(f"{group.where}: weights is missing, expected 4-bit integers")
    _require(weights, "num_bits", 4)
    _require(weights, "type", "int")
    _require(weights, "strategy", "group", "channel")
    _require(weights, "dynamic", False, None)
    _require(weights, "actorder", None, "static", "weight", False)


def _check_int8(group: Fields) -> None:
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
