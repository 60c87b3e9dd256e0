"""Named devices (data sheets) and model shapes (papers, model cards), for simulation.

Link rates are bytes/s in one direction, so half of NVLink's bidirectional figure; the host is
connected by 16 lanes of PCIe 4 or 5.

A cost model from data sheets: the roofline of a model on stages × ranks of a device.

All operators except attention take the time of reading the weights or of multiplying by them,
whichever is longer, plus the all-reduces within a stage, the transfers between stages and fixed
overheads. Attention is memory-bound in decodes (every slot is read) and compute-bound in prefills.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeVar

from engine.cost.model import CostModel
from engine.errors import InvalidRequest, StartupError

_FAR = 1 << 20  # tokens; beyond the roofline's ridge the cost is a straight line


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator: dense FLOP/s at the model's dtype, bandwidth (bytes/s) and size (bytes) of
    its memory, and bytes/s in one direction to other devices of the machine (`link`), to other
    machines (`network`) and to host memory (`host`)."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    host: float = 32e9


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model: every step reads all `parameters`; `width` is heads × head size;
    `kv_bytes` is the KV cache per token, summed over all layers."""

    name: str
    parameters: float
    layers: int
    hidden: int
    width: int
    kv_bytes: float
    weight_bytes: float = 2.0  # per parameter
    activation_bytes: float = 2.0  # per element that crosses a link
    context: int = 2048

    @classmethod
    def gpt(cls, name: str, layers: int, hidden: int) -> "ModelSpec":
        """A model of GPT-3's family in fp16, with multi-head attention (no grouped KV heads)."""
        parameters = layers * 12 * hidden**2 + 50_257 * hidden
        return cls(name, parameters, layers, hidden, hidden, kv_bytes=4.0 * layers * hidden)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The fractions of the data sheet's rates that are reached, and fixed overheads in seconds."""

    compute: float = 0.6
    attention: float = 0.4  # the share of the FLOP/s that prefills use
    memory: float = 0.8
    link: float = 0.7
    usable_memory: float = 0.9
    per_step: float = 0.0005  # launching, sampling, returning the result
    per_layer: float = 5e-6  # norms, residuals, rotary: small kernels between the large ones
    per_collective: float = 10e-6
    per_handoff: float = 30e-6


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model on `stages` × `ranks` devices. `slowdown` multiplies all times, to match a measured
    engine which is further from the roofline."""

    device: DeviceSpec
    shape: ModelSpec
    stages: int = 1
    ranks: int = 1
    efficiency: Efficiency = Efficiency()
    slowdown: float = 1.0

    @property
    def num_slots(self) -> int:
        """Tokens whose KV cache fits beside the weights. Raises `StartupError` if that is 0."""
        shape = self.shape
        memory = self.stages * self.ranks * self.device.memory * self.efficiency.usable_memory
        slots = int((memory - shape.parameters * shape.weight_bytes) / shape.kv_bytes)
        if slots < 1:
            raise StartupError(
                f"{shape.name} does not fit on {self.stages * self.ranks} × {self.device.name}"
            )
        return slots

    @property
    def slot_seconds(self) -> float:
        """Seconds to move one token's KV between device and host, all devices in parallel."""
        wire = self.stages * self.ranks * self.device.host * self.efficiency.link
        return self.shape.kv_bytes / wire

    def cost(self) -> CostModel:
        """The cost of a step through all stages, one after the other."""
        knee = max(1, round(self._ridge()))
        curve = tuple((n, self._tokens(n)) for n in (0, knee, knee + _FAR))
        device, kept = self.device, self.efficiency
        read = self.ranks * device.bandwidth * kept.memory
        multiply = self.ranks * device.flops * kept.attention
        return CostModel(
            curve,
            per_slot=self.slowdown * self.shape.kv_bytes / read,
            per_pair=self.slowdown * 4.0 * self.shape.width * self.shape.layers / multiply,
        )

    def _ridge(self) -> float:
        """The batch size in tokens at which compute time equals the time of reading weights."""
        kept = self.efficiency
        intensity = self.device.flops * kept.compute / (self.device.bandwidth * kept.memory)
        return intensity * self.shape.weight_bytes / 2.0

    def _tokens(self, num_tokens: int) -> float:
        """Seconds of everything except attention."""
        device, shape, kept = self.device, self.shape, self.efficiency
        weights = shape.parameters / self.ranks
        reading = weights * shape.weight_bytes / (device.bandwidth * kept.memory)
        multiplying = 2.0 * weights * num_tokens / (device.flops * kept.compute)
        fixed = kept.per_step + shape.layers * kept.per_layer
        links = self._all_reduces(num_tokens) + self._handoffs(num_tokens)
        return self.slowdown * (max(reading, multiplying) + fixed + links)

    def _all_reduces(self, num_tokens: int) -> float:
        """Seconds of two ring all-reduces per layer over the ranks of a stage."""
        if self.ranks == 1:
            return 0.0
        share = 2.0 * (self.ranks - 1) / self.ranks
        each = share * self._hidden_bytes(num_tokens) / (self.device.link * self.efficiency.link)
        return 2.0 * self.shape.layers * (each + self.efficiency.per_collective)

    def _handoffs(self, num_tokens: int) -> float:
        """Seconds of the transfers between stages: each rank sends its share of the hidden states,
        and the receiving stage gathers them."""
        if self.stages == 1:
            return 0.0
        wire = self.ranks * self.device.network * self.efficiency.link
        each = self._hidden_bytes(num_tokens) / wire + self.efficiency.per_handoff
        return (self.stages - 1) * each

    def _hidden_bytes(self, num_tokens: int) -> float:
        return num_tokens * self.shape.hidden * self.shape.activation_bytes


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
