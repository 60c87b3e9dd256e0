"""Loads LoRA adapters into a worker's part of the model, and unloads them, while steps run.

The files of a LoRA adapter: read once, hashed, and checked against the model's linears.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from engine.errors import StartupError
from engine.lora import LoraReport, LoraSpec
from engine.worker.lora.model import HeadLowRank, LoraLinear, LoraModel
from engine.worker.lora.peft_config import CONFIG_FILE, PeftConfig
from engine.worker.lora.peft_names import (
    WEIGHTS_FILE,
    check_rank,
    check_shape,
    check_target,
    place_of,
)
from engine.worker.ports import LowRank, LowRankUp, Operators

DIGEST_BYTES = 32


class LowRankPair(NamedTuple):
    """The LoRA of one module in float32: `up` has its scale."""

    down: Tensor  # A, [rank, in]
    up: Tensor  # scale · B, [out, rank]


@dataclass(frozen=True, slots=True)
class LoraFiles:
    """A checked adapter: the LoRA of each module by name, and the digest of the files' bytes."""

    digest: str
    pairs: Mapping[str, LowRankPair]

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(len(pair.down) for pair in self.pairs.values())


def read_lora(
    directory: Path, linears: Mapping[str, tuple[int, int]], max_rank: int, digest: str = ""
) -> LoraFiles:
    """Read an adapter for a model whose linears have these outputs and inputs by name.

    Raises `StartupError` with one line that names the field or tensor, or if the files do not have
    the given digest.
    """
    texts = [_read(directory / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
    found = _digest(texts)
    if digest not in ("", found):
        raise StartupError(f"the files in {directory} have changed since the adapter was loaded")
    config = PeftConfig.parse(_parsed(texts[0], directory))
    try:
        tensors = load(texts[1])
    except (SafetensorError, ValueError, KeyError) as error:
        raise StartupError(
            f"{directory / WEIGHTS_FILE} is not a safetensors file: {error}"
        ) from error
    return LoraFiles(found, _pairs(tensors, config, linears, max_rank))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # the path has a NUL
        raise StartupError(f"cannot read {str(path)!r}: {error}") from error


def _digest(texts: list[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
    return digest.hexdigest()


def _parsed(text: bytes, directory: Path) -> dict[str, object]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{directory / CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{directory / CONFIG_FILE} is not a JSON object")
    return config


def _pairs(
    tensors: Mapping[str, Tensor],
    config: PeftConfig,
    linears: Mapping[str, tuple[int, int]],
    max_rank: int,
) -> dict[str, LowRankPair]:
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        module, factor = place_of(name, linears)
        factors.setdefault(module, {})[factor] = _checked(name, tensor, config, module, max_rank)
    if not factors:
        raise StartupError(f"{WEIGHTS_FILE} has no tensors")
    for module in () if config.targets_all else linears:  # some are no linears for PyTorch
        if module not in factors and config.targets_module(module):
            raise StartupError(f"{WEIGHTS_FILE} has no LoRA of {module}, a target module")
    return {
        module: _pair(module, found, linears[module], config) for module, found in factors.items()
    }


def _checked(name: str, tensor: Tensor, config: PeftConfig, module: str, max_rank: int) -> Tensor:
    check_target(name, module, config)
    check_rank(module, config, max_rank)
    if not tensor.is_floating_point():
        raise StartupError(f"tensor {name} has dtype {tensor.dtype}, expected floats")
    if not bool(torch.isfinite(tensor).all()):
        raise StartupError(f"tensor {name} has NaN or infinite values")
    return tensor.float()


def _pair(
    module: str, factors: Mapping[str, Tensor], sizes: tuple[int, int], config: PeftConfig
) -> LowRankPair:
    for factor in ("A", "B"):
        if factor not in factors:
            raise StartupError(
                f"tensor {module}.lora_{factor}.weight is missing from {WEIGHTS_FILE}"
            )
        check_shape(module, factor, factors[factor].shape, sizes, config)
    return LowRankPair(factors["A"], factors["B"] * config.scale_of(module))


@dataclass(slots=True)
class Loras:
    """The LoRA adapters of a worker. All methods may be called while another thread runs steps.

    `linear_sizes` returns outputs and inputs of all linears of the whole model by name, also of
    those in other workers. `why_not` is the reason if no adapter can be loaded.
    """

    model: LoraModel
    operators: Operators
    linear_sizes: Callable[[], Mapping[str, tuple[int, int]]]
    max_rank: int
    why_not: str = ""
    _whole: Mapping[str, tuple[int, int]] | None = None

    @property
    def linears(self) -> Sequence[LoraLinear]:
        """The linears of this worker that adapters can change."""
        return self.model.linears

    def load(self, spec: LoraSpec) -> LoraReport:
        """Read, check and load an adapter; the report has the error if it cannot be loaded."""
        try:
            with torch.inference_mode():
                files = self._read(spec)
                num_bytes = self.model.add(spec.lora_id, self._changes(files))
        except (StartupError, MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error) or "there is not enough memory"
            return LoraReport(spec.lora_id, error=f"LoRA adapter {spec.name!r}: {reason}")
        return LoraReport(spec.lora_id, files.digest, files.rank, num_bytes)

    def unload(self, lora_id: int) -> None:
        """Free an adapter, which no step in flight may use."""
        self.model.remove(lora_id)

    def _read(self, spec: LoraSpec) -> LoraFiles:
        if self.why_not:
            raise StartupError(self.why_not)
        if self._whole is None:
            self._whole = self.linear_sizes()
        if not self._whole:
            raise StartupError("LoRA is not supported for this architecture")
        return read_lora(Path(spec.path).expanduser(), self._whole, self.max_rank, spec.digest)

    def _changes(self, files: LoraFiles) -> dict[LoraLinear, LowRank]:
        """What the adapter adds to each linear of this worker."""
        changes = {linear: self._change(linear, files.pairs) for linear in self.model.linears}
        return {linear: change for linear, change in changes.items() if change is not None}

    def _change(self, linear: LoraLinear, pairs: Mapping[str, LowRankPair]) -> LowRank | None:
        """The factors of a fused linear: A of all its modules in one matrix, and for each of its
        parts the rows of B that belong to this rank. The ranks of a row-parallel linear have some
        columns of A each, and their results are summed."""
        if linear.is_of_heads:
            return self._change_of_heads(linear, pairs)
        downs, ups = [], []
        places: dict[str, slice] = {}
        num_ranks = first_output = 0
        for part in linear.parts:
            last_output = first_output + len(part.rows)
            pair = pairs.get(part.module)
            if pair is not None:
                if part.module not in places:
                    down = pair.down[:, part.columns.start : part.columns.stop]
                    downs.append(down if part.tiles is None else part.tiles.tiled(down))
                    places[part.module] = slice(num_ranks, num_ranks + len(pair.down))
                    num_ranks += len(pair.down)
                rows = pair.up[part.rows.start : part.rows.stop]
                columns = slice(first_output, last_output)
                ups.append(LowRankUp(places[part.module], columns, rows))
            first_output = last_output
        return self.operators.loras.low_rank(torch.cat(downs), ups) if ups else None

    def _change_of_heads(
        self, linear: LoraLinear, pairs: Mapping[str, LowRankPair]
    ) -> HeadLowRank | None:
        """The factors of each head: its rows of B, or these and then A, both transposed."""
        pair = pairs.get(linear.parts[0].module)
        if pair is None:
            return None
        heads, ranks = [], slice(0, len(pair.down))
        for part in linear.parts:
            down, up = pair.down, pair.up[part.rows.start : part.rows.stop]
            if part.is_transposed:
                down, up = up.t().contiguous(), down.t().contiguous()
            change = LowRankUp(ranks, slice(0, len(up)), up)
            heads.append(self.operators.loras.low_rank(down, [change]))
        return HeadLowRank(tuple(heads))
