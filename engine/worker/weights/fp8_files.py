"""Safetensors whose linears are 8-bit floats (e4m3) with scales: of the tensor, of each output
channel, or of blocks such as 128 × 128 (DeepSeek, Qwen).

A weight is its e4m3 number times its scale, in float32. GPUs keep both. A device that widens them
to bfloat16 rounds each to 8 significant bits, by at most 0.4 %; float32 keeps them exactly. Scales
of activations are not needed: activations are not quantized, or with scales of their own.
"""

# mypy: disable-error-code="no-untyped-call"
from pathlib import Path

import torch

from engine.errors import StartupError
from engine.worker.ports import PreferredFormat, Weight
from engine.worker.weights.checkpoint_files import FLOATS, SafetensorsFiles
from engine.worker.weights.formats.fp8 import FP8, Fp8Weight

DTYPE = "F8_E4M3"
WEIGHT = ".weight"
SCALES = ("_scale_inv", "_scale")  # suffixes of a weight's scales, which it is multiplied by
OTHERS = (".input_scale", ".output_scale", ".k_scale", ".v_scale")
Block = tuple[int, int]  # outputs and inputs that have a scale in common


class Fp8Files(SafetensorsFiles):
    """A directory of safetensors in which matrices may be FP8, each with its scales."""

    def __init__(self, directory: Path, block: Block | None) -> None:
        """`block` is the size of blocks of scales, if config.json names one."""
        super().__init__(directory)
        self._block = block
        hidden = {name for name in self._shards if name.endswith(OTHERS)}
        for name in self._shards:
            hidden |= {name + end for end in SCALES if name.endswith(WEIGHT)}
        self._names = self._shards.keys() - hidden

    @property
    def preferred_format(self) -> PreferredFormat:
        """That of the files, else bfloat16, which the CPU keeps if it has instructions for it."""
        return PreferredFormat(stored=(FP8,), floats="bfloat16")

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._is_fp8(name):
            return super().shape(name)
        shape = tuple(self.header(name).get_shape())
        self._scale_block(name, shape)
        return shape

    def read(self, name: str, index: tuple[slice, ...]) -> Weight:
        """Floats if the columns begin within a block."""
        values = self.header(name)[index]
        if not self._is_fp8(name):
            return values
        shape = tuple(self.header(name).get_shape())
        block = self._scale_block(name, shape)
        scales = self.header(self._scale_name(name))[...].float().reshape(_counts(shape, block))
        rows, columns = (
            torch.arange(size)[run] // step
            for run, size, step in zip(index, shape, block, strict=True)
        )
        scales = scales[rows]
        first = range(shape[1])[index[1]].start
        if first % block[1] and first // block[1] != int(columns[-1]):
            return values.float() * scales[:, columns]
        run = block[1] if first % block[1] == 0 else len(columns)
        return Fp8Weight(values, scales[:, columns[0] : columns[-1] + 1].contiguous(), run)

    def _is_fp8(self, name: str) -> bool:
        header = self.header(name)
        return header.get_dtype() == DTYPE and len(header.get_shape()) == 2

    def _scale_name(self, name: str) -> str:
        found = next((name + end for end in SCALES if name + end in self._shards), None)
        if found is None:
            raise StartupError(f"tensor {name} is {DTYPE} without {name}{SCALES[0]}")
        return found

    def _scale_block(self, name: str, shape: tuple[int, ...]) -> Block:
        """The outputs and inputs that have a scale in common, from the shape of the scales."""
        scale_name = self._scale_name(name)
        header = self.header(scale_name)
        if header.get_dtype() not in FLOATS:
            raise StartupError(f"tensor {scale_name} is {header.get_dtype()}, expected floats")
        found = tuple(header.get_shape())
        outputs, inputs = shape
        kinds = [(outputs, inputs), (1, inputs)] + ([self._block] if self._block else [])
        for block in kinds:
            counts = _counts(shape, block)
            if found == counts or (counts[1] == 1 and found == counts[:1]):
                return block
            if counts == (1, 1) and not found:
                return block
        expected = " or ".join(str(list(_counts(shape, block))) for block in kinds)
        raise StartupError(
            f"tensor {scale_name} has shape {list(found)}, expected {expected} for a weight of "
            f"shape {list(shape)}"
        )


def _counts(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    """How many blocks a weight has along its outputs and its inputs."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
