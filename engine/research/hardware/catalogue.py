"""Named devices (data sheets) and model shapes (papers, model cards), for simulation.

Link rates are bytes/s in one direction, so half of NVLink's bidirectional figure; the host is
connected by 16 lanes of PCIe 4 or 5.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar

from engine.errors import InvalidRequest
from engine.research.hardware.deployment import DeviceSpec, ModelSpec

T = TypeVar("T", DeviceSpec, ModelSpec)

_GIB = 2.0**30

DEVICES: dict[str, DeviceSpec] = {
    device.name: device
    for device in (
        # name, dense fp16 FLOP/s, bytes/s, bytes, link, network, host
        DeviceSpec("a100-40gb", 312e12, 1555e9, 40 * _GIB, 300e9, 25e9, 32e9),
        DeviceSpec("a100-80gb", 312e12, 2039e9, 80 * _GIB, 300e9, 25e9, 32e9),
        DeviceSpec("h100", 989e12, 3350e9, 80 * _GIB, 450e9, 50e9, 64e9),
        DeviceSpec("h200", 989e12, 4800e9, 131 * _GIB, 450e9, 50e9, 64e9),
        DeviceSpec("l4", 121e12, 300e9, 24 * _GIB, 32e9, 12.5e9, 32e9),
    )
}

SHAPES: dict[str, ModelSpec] = {
    shape.name: shape
    for shape in (
        # Orca, table 1
        ModelSpec.gpt("gpt3-13b", 40, 5120),
        ModelSpec.gpt("gpt3-101b", 80, 10240),
        ModelSpec.gpt("gpt3-175b", 96, 12288),
        ModelSpec.gpt("gpt3-341b", 120, 15360),
        # name, parameters, layers, hidden, width, bytes of keys and values per token
        ModelSpec("llama-3.1-8b", 7.5e9, 32, 4096, 4096, 131_072, context=131_072),
        ModelSpec("llama-3.1-70b", 69.5e9, 80, 8192, 8192, 327_680, context=131_072),
        ModelSpec("qwen2.5-0.5b", 0.49e9, 24, 896, 896, 12_288, context=32_768),
        ModelSpec("qwen2.5-7b", 7.07e9, 28, 3584, 3584, 57_344, context=131_072),
    )
}


def parse_spec(kind: type[T], values: Mapping[str, object]) -> T:
    """A device or model shape from the fields of a JSON object. Raises `InvalidRequest`."""
    names = {field.name for field in fields(kind)}
    for name, value in values.items():
        if name not in names:
            known = ", ".join(sorted(names))
            raise InvalidRequest(f"unknown field {name!r}; the fields are {known}", param=name)
        if name != "name" and not (isinstance(value, int | float) and value > 0):
            raise InvalidRequest(f"{name} must be a positive number, not {value!r}", param=name)
    try:
        return kind(**values)  # type: ignore[arg-type]  # checked above, field by field
    except TypeError as error:
        raise InvalidRequest(f"{kind.__name__.lower()} is incomplete: {error}") from error
