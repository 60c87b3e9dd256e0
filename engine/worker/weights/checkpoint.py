"""A model's name to its directory, its config, and the family that reads it.

Families and attention backends are adapters: they are found by name, in tables of strings.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.files import source_digest
from engine.grammar import GrammarCompiler, TokenTable
from engine.media import EncoderReport
from engine.worker.model.torch_operators import (
    TorchHeadLinear,
    TorchHeads,
    TorchLinear,
    TorchOperators,
)
from engine.worker.ports import (
    BuildsEncoder,
    BuildsMtp,
    ImageEncoder,
    LinearWeight,
    ModelFamily,
    ModelShape,
    MtpModel,
    Operators,
    PoolingConfig,
    PoolingMethod,
    PreferredFormat,
    Shard,
    StageModel,
    WeightSource,
    dequantize,
)
from engine.worker.weights.checkpoint_files import (
    BareFiles,
    CheckpointFiles,
    QuantizedFiles,
    SafetensorsFiles,
)
from engine.worker.weights.expert_files import ExpertFiles, has_fused_experts
from engine.worker.weights.formats.fp8 import FP8
from engine.worker.weights.formats.int8 import INT8
from engine.worker.weights.formats.mxfp4 import MXFP4
from engine.worker.weights.fp8_files import Block, Fp8Files
from engine.worker.weights.int4_files import Int4Files
from engine.worker.weights.packed_cache import PackedCache
from engine.worker.weights.random import RandomWeights
from engine.worker.weights.source import Weights
from engine.worker_settings import WorkerSettings


def load_by_name(path: str) -> object:
    """The object that `"module:name"`, an entry of an adapter table, names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def load_from_table(table_path: str, what: str, name: str) -> object:
    """The entry `name` of a table; raises `StartupError` with all known names."""
    table = cast(Mapping[str, str], load_by_name(table_path))
    if name not in table:
        raise StartupError(f"{what} {name!r} is not supported; known: {', '.join(table)}")
    return load_by_name(table[name])


class NoHeads(TorchHeads):
    """Linears from tensors without contents."""

    def linear(self, weights: Sequence[LinearWeight]) -> TorchHeadLinear:
        return TorchHeadLinear(dequantize(weights[0]))


class NoOperators(TorchOperators):
    """Builds a model from tensors without contents, and so allocates nothing large."""

    heads = NoHeads()

    def linear(self, weights: Sequence[LinearWeight], bias: Tensor | None) -> TorchLinear:
        return TorchLinear(dequantize(weights[0]), bias)


def _open_files(
    checkpoint: Path, mmproj: Path | None, config: Mapping[str, object]
) -> CheckpointFiles:
    """The tensors of a checkpoint directory or GGUF file."""
    if mmproj is not None:
        open_joined = cast(
            Callable[[Path, Path], CheckpointFiles],
            load_by_name("adapters.gguf.projector_tensors:JoinedTensors"),
        )
        return open_joined(checkpoint, mmproj)
    if checkpoint.is_file():
        open_gguf = cast(
            Callable[[Path], CheckpointFiles], load_by_name("adapters.gguf.tensors:GgufTensors")
        )
        return open_gguf(checkpoint)
    stored_scheme = cast(
        Callable[[Mapping[str, object]], str],
        load_by_name("adapters.models.quantization:stored_scheme"),
    )
    scheme = stored_scheme(config)
    if scheme in ("", MXFP4.name):
        files = SafetensorsFiles(checkpoint)
        if BareFiles.MARK in files.names:
            return BareFiles(checkpoint)
        if not has_fused_experts(files.names):
            return files
        is_gpt_oss = config.get("architectures") == ["GptOssForCausalLM"]
        return ExpertFiles(checkpoint, is_interleaved=is_gpt_oss)
    if scheme == FP8:
        fp8_block = cast(
            Callable[[Mapping[str, object]], Block | None],
            load_by_name("adapters.models.quantization:fp8_block"),
        )
        return Fp8Files(checkpoint, fp8_block(config))
    return QuantizedFiles(checkpoint) if scheme == INT8.name else Int4Files(checkpoint, scheme)


def mtp_shard(shape: ModelShape) -> Shard:
    """The shard of the layer for multi-token prediction, which has attention, of such a model."""
    return Shard.whole(replace(shape, num_layers=1, attention=(), recurrent=(None,)))


class Survey(NamedTuple):
    """Parameters of a whole model, and of its layer for multi-token prediction, 0 if that is not
    loaded."""

    num_parameters: int
    num_mtp_parameters: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory or file, its config, and the family that reads it."""

    directory: Path
    architecture: str
    family: ModelFamily
    end_ids: tuple[int, ...]
    files: CheckpointFiles | None = None  # None: the weights are random
    pooling: PoolingConfig | None = None  # None: it generates text

    @classmethod
    def open(cls, model: str, task: str = "auto", mmproj: str = "") -> "Checkpoint":
        """Find a checkpoint by directory, file or hub id, with the file of its image encoder, if it
        has one. Raises `StartupError`, also if it cannot do the task."""
        resolve = cast(
            Callable[[str], Path], load_by_name("adapters.models.checkpoint:resolve_checkpoint")
        )
        read_config = cast(
            Callable[[Path, Path | None], dict[str, object]],
            load_by_name("adapters.models.checkpoint:read_config"),
        )
        end_token_ids = cast(
            Callable[[Path], tuple[int, ...]],
            load_by_name("adapters.models.checkpoint:end_token_ids"),
        )
        check_architecture = cast(
            Callable[[Mapping[str, object]], str],
            load_by_name("adapters.models.checks.architecture:check_architecture"),
        )
        read_pooling = cast(
            Callable[[Path, Mapping[str, object], str, str], PoolingConfig | None],
            load_by_name("adapters.models.base.pooling:read_pooling"),
        )
        directory = resolve(model)
        encoder = Path(mmproj) if mmproj else None
        config = read_config(directory, encoder)
        name = check_architecture(config)
        reads = load_from_table("adapters.models:FAMILIES", "architecture", name)
        family = cast(Callable[[Mapping[str, object]], ModelFamily], reads)(config)
        is_random = config.get("random_weights") is True
        files = None if is_random else _open_files(directory, encoder, config)
        pooling = read_pooling(directory, config, name, task)
        end_ids = end_token_ids(directory)
        return cls(directory, name, family, end_ids, files, pooling)

    @property
    def preferred_format(self) -> PreferredFormat:
        """What it is computed in when the settings do not say it."""
        preferred = PreferredFormat() if self.files is None else self.files.preferred_format
        return preferred._replace(keeps_kv=self.family.shape.is_causal)

    @property
    def pooling_method(self) -> PoolingMethod | None:
        """The hidden states that are pooled; None if the model generates text."""
        return None if self.pooling is None else self.pooling.method

    def open_weights(
        self, dtype: torch.dtype, progress: Callable[[str, int, int], None]
    ) -> Weights | RandomWeights:
        """Its tensors in this dtype; raises `StartupError`."""
        if self.files is None:
            return RandomWeights(dtype, progress)
        return Weights(self.files, dtype, progress)

    def survey(
        self, weights: Weights | RandomWeights, shard: Shard, *, has_mtp: bool = False
    ) -> Survey:
        """Check names and shapes of all tensors, including those that other shards load; `has_mtp`
        if the layer for multi-token prediction is loaded too. Raises `StartupError`.
        """
        whole, own = weights.outline(), weights.outline()
        all_of_it = replace(Shard.whole(shard.shape), has_logits=shard.has_logits)
        model = self.family.build(whole, all_of_it, NoOperators())
        self.build_head(whole, all_of_it)
        self.build_encoder(whole, NoOperators())
        num_parameters = num_mtp = whole.num_parameters
        if has_mtp:
            self.build_mtp(whole, shard.shape, NoOperators(), model)
            num_mtp = whole.num_parameters
        whole.check_all_requested(self.family.ignored_weights)
        self.family.build(own, shard, NoOperators())
        self.build_head(own, shard)
        if shard.is_first:
            self.build_encoder(own, NoOperators())
        weights.expect(len(whole.requested) if has_mtp else len(own.requested))
        return Survey(num_parameters, num_mtp - num_parameters)

    def build_mtp(
        self, weights: WeightSource, shape: ModelShape, operators: Operators, model: StageModel
    ) -> MtpModel:
        """The layer for multi-token prediction behind a model that the family has built. Raises
        `StartupError` if there is none."""
        if not hasattr(self.family, "build_mtp"):
            raise StartupError(
                f"{self.architecture} has no layer for multi-token prediction that is supported; "
                'use another method than "mtp" in --speculative-config'
            )
        if self.files is not None and not weights.has("mtp.fc.weight"):
            raise StartupError(
                "the checkpoint has no layer for multi-token prediction (tensors mtp.*); use "
                'another method than "mtp" in --speculative-config'
            )
        return cast(BuildsMtp, self.family).build_mtp(weights, mtp_shard(shape), operators, model)

    @property
    def encoder(self) -> EncoderReport | None:
        """The image encoder, None without one; also if the files have no tensor of it."""
        if self.pooling is not None or not hasattr(self.family, "build_encoder"):
            return None
        family = cast(BuildsEncoder, self.family)
        if self.files is not None and not any(
            name.startswith(family.encoder_roots) for name in self.files.names
        ):
            return None
        return family.encoder

    def build_encoder(self, weights: WeightSource, operators: Operators) -> ImageEncoder | None:
        """The image encoder; None without one. Raises `StartupError`."""
        if self.encoder is None:
            return None
        return cast(BuildsEncoder, self.family).build_encoder(weights, operators)

    def build_head(self, weights: WeightSource, shard: Shard) -> Callable[[Tensor], Tensor] | None:
        """The layers behind the pooling, on the last stage; None if there are none."""
        if self.pooling is None or self.pooling.head is None or not shard.is_last:
            return None
        return self.pooling.head.build(weights, shard.shape)

    def packed_cache(self, shard: Shard, settings: WorkerSettings) -> PackedCache:
        """The cache of a shard's packed weights; of random weights nothing is cached."""
        if self.files is None:
            return PackedCache()
        share = (shard.span.start, shard.span.stop, shard.rank, shard.num_ranks)
        reader = source_digest(Path(inspect.getfile(type(self.files))).parent)
        return PackedCache(
            folder=settings.kernels.packed_cache,
            max_bytes=settings.kernels.packed_cache_size,
            files=tuple(self.files.files),
            share=share,
            reader=reader,
            is_alone=settings.placement.num_ranks == settings.num_replicas == 1,
        )

    def open_token_table(self) -> TokenTable:
        """Its vocabulary; reading a large one takes seconds."""
        load_token_table = cast(
            Callable[[Path], TokenTable], load_by_name("adapters.tokenizers:load_token_table")
        )
        return load_token_table(self.directory)

    def open_grammars(self) -> GrammarCompiler:
        """The grammar compiler over its vocabulary."""
        compiler = cast(
            Callable[[TokenTable, int], GrammarCompiler],
            load_by_name("adapters.grammar.llguidance_masks:LlguidanceCompiler"),
        )
        return compiler(self.open_token_table(), self.family.shape.vocab_size)
