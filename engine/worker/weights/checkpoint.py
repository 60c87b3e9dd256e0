"""A model's name to its directory, its config, and the family that reads it.

Families and attention backends are adapters: they are found by name, in tables of strings.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.grammar import GrammarCompiler, TokenTable
from engine.worker.model.shard import Shard
from engine.worker.model.torch_operators import TorchLinear, TorchOperators
from engine.worker.ports import ModelFamily, ReadsFamily, WeightSource
from engine.worker.weights.checkpoint_files import (
    CheckpointFiles,
    PreferredFormat,
    QuantizedFiles,
    SafetensorsFiles,
)
from engine.worker.weights.int8_weight import Weight, dequantize
from engine.worker.weights.quantized_cache import facts_about, file_for, quantizing
from engine.worker.weights.random import RandomWeights
from engine.worker.weights.source import Weights


def load_by_name(path: str) -> object:
    """What `"module:name"`, an entry of an adapter's table, stands for."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def load_from_table(table_path: str, what: str, name: str) -> object:
    """The entry `name` of a table; raises `StartupError` with what there is."""
    table = cast(Mapping[str, str], load_by_name(table_path))
    if name not in table:
        raise StartupError(f"{what} {name!r} is not supported; known: {', '.join(table)}")
    return load_by_name(table[name])


class _NoOperators(TorchOperators):
    """For a model without contents: nothing large is put together."""

    def linear(self, weights: Sequence[Weight], bias: Tensor | None) -> TorchLinear:
        return TorchLinear(dequantize(weights[0]), bias)


def _open_stored(checkpoint: Path, config: Mapping[str, object]) -> CheckpointFiles:
    """The tensors of a directory or file, in the format that it is in."""
    if checkpoint.is_file():
        open_gguf = cast(
            Callable[[Path], CheckpointFiles], load_by_name("adapters.gguf.tensors:GgufTensors")
        )
        return open_gguf(checkpoint)
    has_rounded = cast(
        Callable[[Mapping[str, object]], bool],
        load_by_name("adapters.models.quantization:has_int8_weights"),
    )
    return QuantizedFiles(checkpoint) if has_rounded(config) else SafetensorsFiles(checkpoint)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory or file, its config, and the family that reads it."""

    directory: Path
    architecture: str
    family: ModelFamily
    end_ids: tuple[int, ...]
    stored: CheckpointFiles | None = None  # None: contents are random

    @classmethod
    def open(cls, model: str) -> "Checkpoint":
        """Find a directory or hub id; raises `StartupError`."""
        resolve = cast(
            Callable[[str], Path], load_by_name("adapters.models.checkpoint:resolve_checkpoint")
        )
        read_config = cast(
            Callable[[Path], dict[str, object]],
            load_by_name("adapters.models.checkpoint:read_config"),
        )
        end_token_ids = cast(
            Callable[[Path], tuple[int, ...]],
            load_by_name("adapters.models.checkpoint:end_token_ids"),
        )
        directory = resolve(model)
        config = read_config(directory)
        names = config.get("architectures")
        if not isinstance(names, list) or len(names) != 1:
            raise StartupError(f"config.json: architectures is {names!r}, expected one name")
        reads = load_from_table("adapters.models:FAMILIES", "architecture", str(names[0]))
        family = cast(ReadsFamily, reads)(config)
        is_random = config.get("random_weights") is True
        stored = None if is_random else _open_stored(directory, config)
        return cls(directory, str(names[0]), family, end_token_ids(directory), stored)

    @property
    def suits(self) -> PreferredFormat:
        """What its linears are computed in, unless the settings say."""
        return PreferredFormat.FLOATS if self.stored is None else self.stored.suits

    def open_weights(
        self, dtype: torch.dtype, progress: Callable[[str, int, int], None]
    ) -> Weights | RandomWeights:
        """Its tensors in this dtype; raises `StartupError`."""
        if self.stored is None:
            return RandomWeights(dtype, progress)
        return Weights(self.stored, dtype, progress)

    def survey(self, weights: Weights | RandomWeights, shard: Shard) -> int:
        """Look at names and shapes of all tensors, also of those that other shards take.

        Returns the number of parameters of the whole model. Raises `StartupError`.
        """
        whole, own = weights.outline(), weights.outline()
        self.family.build(whole, Shard.whole(shard.shape), _NoOperators())
        whole.check_all_taken(self.family.ignored_weights)
        self.family.build(own, shard, _NoOperators())
        weights.expect(len(own.taken))
        return whole.num_parameters

    def quantizing(
        self, weights: WeightSource, shard: Shard, cache_dir: str
    ) -> AbstractContextManager[WeightSource]:
        """The weights with all matrices in 8 bits, kept in `cache_dir` for the next start."""
        files = () if self.stored is None else self.stored.files
        num_tensors = 0 if self.stored is None else len(self.stored.names)
        share = (shard.span.start, shard.span.stop, shard.rank, shard.num_ranks)
        kept = file_for(files, share, cache_dir)
        return quantizing(weights, num_tensors, kept, facts_about(files))

    def open_grammars(self) -> GrammarCompiler:
        """Constrained decoding over its vocabulary; reading a large one takes seconds."""
        load_token_table = cast(
            Callable[[Path], TokenTable], load_by_name("adapters.tokenizers:load_token_table")
        )
        open_compiler = cast(
            Callable[[TokenTable, int], GrammarCompiler],
            load_by_name("adapters.grammar:open_compiler"),
        )
        return open_compiler(load_token_table(self.directory), self.family.shape.vocab_size)
