"""The interfaces between the parts of a worker, and the values that cross them.

This package imports no other package of `engine.worker`, so every one of them may import it.
"""

from engine.worker.ports.attention import (
    AttentionBackend,
    AttentionSpec,
    CapturableAttention,
    ChoosesShapes,
    KernelRecorder,
    MakesAttention,
    RecordableAttention,
    RopeAngles,
    ThreadPool,
)
from engine.worker.ports.experts import Experts, ExpertWeights, Routing
from engine.worker.ports.kv import BlockMover, KVCapacity, KVTensors, as_bytes
from engine.worker.ports.layout import Int32s, Int64s, LoraSegment, RaggedLayout
from engine.worker.ports.model import ModelFamily, ReadsFamily, StageModel, StepContext
from engine.worker.ports.operators import (
    Argmax,
    Linear,
    LowRank,
    LowRankUp,
    Norm,
    Operators,
)
from engine.worker.ports.pooling import PoolingConfig, PoolingHead, PoolingMethod
from engine.worker.ports.recurrent import (
    DeltaNet,
    DeltaWeights,
    RecurrentShape,
    RecurrentState,
    StateRuns,
    StepStates,
)
from engine.worker.ports.shapes import (
    FULL_ATTENTION,
    AttentionOptions,
    ExpertShape,
    ModelShape,
    StepLimits,
)
from engine.worker.ports.shard import AllReduce, RankPart, Shard
from engine.worker.ports.weights import (
    DeferredWeight,
    LinearFormat,
    LinearWeight,
    PreferredFormat,
    QuantizedWeight,
    TensorSlice,
    Weight,
    WeightSource,
    common_format,
    dequantize,
    format_of,
    loaded,
    name_of,
)

__all__ = [
    "FULL_ATTENTION",
    "AllReduce",
    "Argmax",
    "AttentionBackend",
    "AttentionOptions",
    "AttentionSpec",
    "BlockMover",
    "CapturableAttention",
    "ChoosesShapes",
    "DeferredWeight",
    "DeltaNet",
    "DeltaWeights",
    "ExpertShape",
    "ExpertWeights",
    "Experts",
    "Int32s",
    "Int64s",
    "KVCapacity",
    "KVTensors",
    "KernelRecorder",
    "Linear",
    "LinearFormat",
    "LinearWeight",
    "LoraSegment",
    "LowRank",
    "LowRankUp",
    "MakesAttention",
    "ModelFamily",
    "ModelShape",
    "Norm",
    "Operators",
    "PoolingConfig",
    "PoolingHead",
    "PoolingMethod",
    "PreferredFormat",
    "QuantizedWeight",
    "RaggedLayout",
    "RankPart",
    "ReadsFamily",
    "RecordableAttention",
    "RecurrentShape",
    "RecurrentState",
    "RopeAngles",
    "Routing",
    "Shard",
    "StageModel",
    "StateRuns",
    "StepContext",
    "StepLimits",
    "StepStates",
    "TensorSlice",
    "ThreadPool",
    "Weight",
    "WeightSource",
    "as_bytes",
    "common_format",
    "dequantize",
    "format_of",
    "loaded",
    "name_of",
]
