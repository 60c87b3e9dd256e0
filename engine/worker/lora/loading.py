"""Loads LoRA adapters into a worker's part of the model, and unloads them, while steps run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import StartupError
from engine.lora import LoraReport, LoraSpec
from engine.worker.lora.model import LoraLinear, LoraModel
from engine.worker.lora.peft_files import LoraFiles, LowRankPair, read_lora
from engine.worker.ports import LowRank, LowRankUp, Operators


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
        return self.operators.low_rank(torch.cat(downs), ups) if ups else None
