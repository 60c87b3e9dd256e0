"""Checkpoints that store a linear of all experts of a layer in one tensor.

The model sees one tensor for each expert and linear, such as `…experts.3.gate_proj.weight`. There
are two forms. In gpt-oss', gate and up are the even and odd outputs of `gate_up_proj`; matrices are
floats `[experts, in, out]`, or MXFP4: `…_blocks` `[experts, out, in / 32, 16]` and `…_scales`
`[experts, out, in / 32]`. In the other (Qwen 3.5 MoE), gate and up are the halves of `gate_up_proj`
and matrices are floats `[experts, out, in]`; Granite 4 has it under other names.
"""

from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from engine.errors import StartupError
from engine.worker.ports import PreferredFormat, Weight
from engine.worker.weights.checkpoint_files import SafetensorsFiles
from engine.worker.weights.formats.mxfp4 import GROUP, MXFP4, mxfp4_weight

BLOCKS, SCALES, BIAS = "_blocks", "_scales", "_bias"
EXPERTS = ".experts."
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
GRANITE = {  # ends of names, and what they are elsewhere
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
}


class ExpertPart(NamedTuple):
    """One tensor of one expert: `size` outputs of a fused linear, `first`, `first + step`, …"""

    stem: str  # the common part of the fused tensors' names
    expert: int
    first: int
    step: int
    size: int
    is_bias: bool

    def outputs(self, run: slice) -> slice:
        """The outputs of the fused linear of which every `step`-th is one of these."""
        return slice(self.first + run.start * self.step, self.first + run.stop * self.step)


class ExpertFiles(SafetensorsFiles):
    """A directory of safetensors, with fused experts as separate tensors."""

    def __init__(self, directory: Path, *, is_interleaved: bool) -> None:
        """`is_interleaved`: in gpt-oss' form."""
        super().__init__(directory)
        self._is_interleaved = is_interleaved
        stems = {stem for name in self._shards if (stem := _stem(name))}
        self._is_mxfp4 = any(stem + BLOCKS in self._shards for stem in stems)
        self._parts = {name: part for stem in stems for name, part in self._parts_of(stem)}
        whole = {name for name in self._shards if not _stem(name)}
        self._names = whole | self._parts.keys()

    @property
    def preferred_format(self) -> PreferredFormat:
        """MXFP4 as stored where the device computes in it, else floats."""
        floats = [name for name in self._shards if self.header(name).get_dtype() != "U8"]
        stored = (MXFP4.name,) if self._is_mxfp4 else ()
        return PreferredFormat(stored=stored, floats=self.floats_of(floats))

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._parts.get(name)
        if part is None:
            return super().shape(name)
        if part.is_bias:
            return (part.size,)
        if part.stem in self._shards:
            return part.size, super().shape(part.stem)[1 if self._is_interleaved else 2]
        return part.size, self._blocks_shape(part.stem)[2] * GROUP

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        part = self._parts.get(name)
        if part is None:
            return super().read(name, index)
        own, outputs = slice(part.expert, part.expert + 1), part.outputs(index[0])
        if part.is_bias:
            return self.header(part.stem + BIAS)[own, outputs][0, :: part.step]
        if part.stem in self._shards and not self._is_interleaved:
            return self.header(part.stem)[own, outputs, index[1]][0]
        if part.stem in self._shards:
            return self.header(part.stem)[own, index[1], outputs][0, :, :: part.step].t()
        return self._read_mxfp4(part, own, outputs, index[1])

    def _read_mxfp4(self, part: ExpertPart, own: slice, outputs: slice, columns: slice) -> Weight:
        """Columns that begin or end within a group make the weight a float one."""
        groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        blocks = self.header(part.stem + BLOCKS)[own, outputs, groups][0, :: part.step]
        scales = self.header(part.stem + SCALES)[own, outputs, groups][0, :: part.step]
        weight = mxfp4_weight(blocks.flatten(1).contiguous(), scales.contiguous())
        if columns.start % GROUP == 0 and columns.stop % GROUP == 0:
            return weight
        floats = weight if isinstance(weight, Tensor) else weight.dequantize()
        start = groups.start * GROUP
        return floats[:, columns.start - start : columns.stop - start]

    def _blocks_shape(self, stem: str) -> tuple[int, ...]:
        blocks, scales = (self.header(stem + suffix) for suffix in (BLOCKS, SCALES))
        shape = tuple(blocks.get_shape())
        is_known = blocks.get_dtype() == scales.get_dtype() == "U8" and len(shape) == 4
        if not is_known or tuple(scales.get_shape()) != shape[:3] or shape[3] != GROUP // 2:
            raise StartupError(
                f"tensor {stem}{BLOCKS} is {blocks.get_dtype()} {list(shape)} with scales "
                f"{list(scales.get_shape())}, which is not MXFP4"
            )
        return shape

    def _parts_of(self, stem: str) -> Sequence[tuple[str, ExpertPart]]:
        """The names of all experts' parts of a fused linear."""
        stored = stem if stem in self._shards else stem + BLOCKS
        for suffix in ("", SCALES) if stored.endswith(BLOCKS) else ("",):
            name = stem + suffix if suffix else stored
            if name not in self._shards:
                raise StartupError(f"tensor {name} is missing from the checkpoint")
        root, _, linear = _usual(stem).rpartition(".")
        kinds = {"weight": False} | ({"bias": True} if stem + BIAS in self._shards else {})
        shape, count = self.header(stored).get_shape(), len(PARTS[linear])
        is_last = self._is_interleaved and stored == stem
        size = shape[2 if is_last else 1] // count
        step, distance = (count, 1) if self._is_interleaved else (1, size)
        return [
            (
                f"{root}.{expert}.{name}.{kind}",
                ExpertPart(stem, expert, number * distance, step, size, is_bias),
            )
            for expert in range(shape[0])
            for number, name in enumerate(PARTS[linear])
            for kind, is_bias in kinds.items()
        ]


def _stem(name: str) -> str:
    """The fused linear that a tensor belongs to, "" if it belongs to none."""
    for suffix in (BLOCKS, SCALES, BIAS, ""):
        stem = name.removesuffix(suffix) if suffix else name
        root, _, linear = _usual(stem).rpartition(".")
        if (stem != name or not suffix) and linear in PARTS and f"{root}.".endswith(EXPERTS):
            return stem
    return ""


def _usual(name: str) -> str:
    """The usual name of a fused linear."""
    for end, usual in GRANITE.items():
        if name.endswith(end):
            return name.removesuffix(end) + usual
    return name


def has_fused_experts(names: Set[str]) -> bool:
    """Whether some of these tensors hold all experts of a layer."""
    return any(map(_stem, names))
