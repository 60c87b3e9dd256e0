"""Checks `quantization_config` of config.json, which describes checkpoints of integer weights.

Supported are W8A8 as `compressed-tensors` writes it (int8 weights, one scale per output channel,
activations quantized at run time), int4 weights with scales of groups: `compressed-tensors`'
`pack-quantized`, GPTQ and AWQ; FP8 weights (`quant_method` fp8, `compressed-tensors`'
`float-quantized`, ModelOpt's FP8); and experts in MXFP4 (gpt-oss). Every other scheme is rejected
with an error that names the field.
"""

from collections.abc import Callable, Mapping

from adapters.models.base.fields import Fields
from engine.errors import StartupError

INT8, INT4, FLOAT8 = "int-quantized", "pack-quantized", "float-quantized"  # compressed-tensors
FP8 = "fp8"


def stored_scheme(config: Mapping[str, object]) -> str:
    """How linears are stored: "int8", "fp8", "mxfp4", a key of `int4_files.SCHEMES`; "": floats.

    Raises `StartupError` for any other scheme.
    """
    scheme = Fields(config).child("quantization_config")
    if scheme is None:
        return ""
    method = scheme.get("quant_method")
    if method == "bitsandbytes":
        raise StartupError(
            f"{scheme.where}: quant_method='bitsandbytes' is not supported, since only its own "
            "library reads its weights; serve the original checkpoint with --weights int8 or int4"
        )
    known = "compressed-tensors", "gptq", "awq", "fp8", "modelopt", "mxfp4"
    _require(scheme, "quant_method", *known)
    if method == "mxfp4":
        return "mxfp4"
    if method == FP8:
        _require(scheme, "fmt", "e4m3", "float8_e4m3fn", None)
        fp8_block(config)
        return FP8
    if method == "modelopt":
        # Of a KV cache in 8 bits there are scales, which a cache in 16 bits needs not.
        _require(scheme, "quant_algo", "FP8", "FP8_PER_CHANNEL_PER_TOKEN")
        return FP8
    if method == "gptq":
        return _check_gptq(scheme)
    if method == "awq":
        return _check_awq(scheme)
    return _check_compressed_tensors(scheme)


def fp8_block(config: Mapping[str, object]) -> tuple[int, int] | None:
    """The outputs and inputs of a block of FP8 weights with one scale, None for other scales.

    Raises `StartupError` if they are not two sizes.
    """
    scheme = Fields(config).child("quantization_config")
    if scheme is None:
        return None
    groups = scheme.child("config_groups") or Fields({})
    weights = [(groups.child(name) or scheme).child("weights") for name in groups.values]
    sizes = [scheme.get("weight_block_size")]
    sizes += [each.get("block_structure") for each in weights if each is not None]
    for size in sizes:
        if size is None:
            continue
        match size:
            case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
                return outputs, inputs
        raise StartupError(f"{scheme.where}: a block of weights is {size!r}, expected two sizes")
    return None


def _check_gptq(scheme: Fields) -> str:
    _require(scheme, "bits", 4)
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
    _require(scheme, "format", *CHECKS)
    stored, check = CHECKS[str(scheme.get("format"))]
    _require(scheme, "quantization_status", "compressed", None)
    if scheme.get("format") != FLOAT8:  # then the KV cache has 16 bits, and needs no scales
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
            _check_targets(group, str(scheme.get("format")))
            check(group)
    return stored


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
    _require(weights, "actorder", None, "static", "weight", "group", False)


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


def _check_fp8(group: Fields) -> None:
    """Scales are read from the tensors; those of activations are not needed."""
    weights = group.child("weights")
    if weights is None:
        raise StartupError(f"{group.where}: weights is missing, expected 8-bit floats")
    _require(weights, "num_bits", 8)
    _require(weights, "type", "float")
    _require(weights, "strategy", "tensor", "channel", "block")
    _require(weights, "symmetric", True, None)
    _require(weights, "dynamic", False, None)


# The formats of compressed-tensors: how `stored_scheme` names them, and what checks a group.
CHECKS: dict[str, tuple[str, Callable[[Fields], None]]] = {
    INT8: ("int8", _check_int8),
    INT4: (INT4, _check_int4),
    FLOAT8: (FP8, _check_fp8),
}


def _require(fields: Fields, name: str, *supported: object) -> None:
    """Raise `StartupError` unless the value is one of `supported`; None is absent or null."""
    value = fields.get(name)
    if not any(value == one and type(value) is type(one) for one in supported):
        known = ", ".join(repr(one) for one in supported)
        raise StartupError(f"{fields.where}: {name}={value!r} is not supported; known: {known}")
