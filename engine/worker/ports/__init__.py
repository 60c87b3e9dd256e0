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
from engine.worker.ports.encoder import (
    BuildsEncoder,
    EncoderPixels,
    EncoderState,
    Encoding,
    ImageEncoder,
)
from engine.worker.ports.experts import ExpertGroups, Experts, ExpertWeights, Routing
from engine.worker.ports.kv import BlockMover, KVCapacity, KVTensors, Moved, MovesInFlight, as_bytes
from engine.worker.ports.layout import EncodedRows, Int32s, Int64s, LoraSegment, RaggedLayout
from engine.worker.ports.model import (
    AddedRows,
    BuildsMtp,
    ModelFamily,
    MtpModel,
    StageModel,
    StepContext,
)
from engine.worker.ports.operators import (
    NUM_LORA_SLOTS,
    Activation,
    Argmax,
    Draw,
    HeadLinear,
    HeadOperators,
    Linear,
    LoraOperators,
    LowRank,
    LowRankUp,
    Norm,
    Operators,
    SamplingOperators,
    SlottedLoras,
)
from engine.worker.ports.pooling import PoolingConfig, PoolingHead, PoolingMethod
from engine.worker.ports.recurrent import (
    ConvShape,
    ConvWeights,
    DeltaShape,
    DeltaWeights,
    MambaShape,
    MambaWeights,
    Recurrence,
    RecurrentShape,
    RecurrentWeights,
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
    HeadTiles,
    LinearFormat,
    LinearWeight,
    Lookup,
    PreferredFormat,
    QuantizedWeight,
    StoredWeights,
    TensorSlice,
    Weight,
    WeightSource,
    common_format,
    dequantize,
    format_of,
    loaded,
    name_of,
)
