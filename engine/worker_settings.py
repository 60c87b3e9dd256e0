"""What a worker starts with, and what it reports after loading. Standard library only."""

from dataclasses import dataclass

from engine.lora import LoraReport, LoraSpec
from engine.media import EncoderReport
from engine.pooling import PoolingReport
from engine.setting import advanced, setting

# Of an element of a weight in memory, by its format or dtype; int4 has a 2-byte scale for each 32.
WEIGHT_BYTES = {"float32": 4.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5625}
WEIGHT_BYTES |= dict.fromkeys(("bfloat16", "float16"), 2.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a model that one worker holds: a pipeline stage (some layers) and a tensor
    parallel rank (a shard of each layer).

    The workers of one model connect at `rendezvous`, a "host:port" on which worker 0 listens. It
    listens on the inherited socket `listener`, a file descriptor that is valid in its own process
    only. The other workers reach this one at `address`. `num_local_workers` workers, this one
    included, run on its machine, and `local_index` is its number among them.
    """

    stage: int = 0
    num_stages: int = 1
    rank: int = 0
    num_ranks: int = 1
    rendezvous: str = ""
    listener: int | None = None
    address: str = "127.0.0.1"
    num_local_workers: int = 1
    local_index: int = 0

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.num_ranks

    @property
    def index(self) -> int:
        """Number of this worker among all workers, ordered by stage, then by rank."""
        return self.stage * self.num_ranks + self.rank

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def returns_results(self) -> bool:
        """Whether this worker returns step results: rank 0 of the last stage."""
        return self.is_last_stage and self.rank == 0

    def __str__(self) -> str:
        return f"stage {self.stage} rank {self.rank}"


def _check_device(name: str) -> None:
    """Raise `ValueError` if no device can have the name."""
    kind, _, number = name.partition(":")
    if name not in ("auto", "cpu", "cuda") and not (kind == "cuda" and number.isdecimal()):
        raise ValueError(f"must be auto, cpu, cuda or cuda:N, not {name!r}")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The formats in which a worker computes, and the kernels with which it does.

    `activation_bits`, "auto", "8" or "14", is the width to which the int8 linears of a CPU quantize
    their inputs. The kernels that failed on a GPU are noted in the directory `kernel_choices`;
    "" notes none.
    """

    dtype: str = setting(
        "auto",
        "model",
        "dtype of weights and activations; auto: the fastest that the device has",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    weights: str = setting(
        "auto",
        "model",
        "format of the linear layers' weights; auto: as --dtype; fp8: only on Hopper GPUs",
        choices=("auto", "float32", "int8", "int4", "fp8"),
    )
    activation_bits: str = "auto"
    device: str = setting(
        "auto",
        "model",
        "cpu, cuda, or cuda:N for the GPU of the first worker; auto: a GPU if there is one",
        "DEVICE",
        check=_check_device,
    )
    attention: str = advanced("auto", "model", "name of the attention backend", "NAME")
    threads: int = setting(
        0,
        "model",
        "compute threads of each worker; 0: an equal share of the cores",
        "N",
        ge=0,
        le=1024,
    )
    packed_cache: str = advanced(
        "",
        "memory",
        "directory for weights that are packed for this CPU, which later starts map and workers "
        "share; default: packed in --cache-dir; off: pack at every start",
        "DIR",
    )
    packed_cache_size: int = advanced(
        32 << 30,
        "memory",
        "maximum size of all files in --packed-cache, each as large as the weights of one model; "
        "the least recently used are removed",
        "SIZE",
        unit="bytes",
        ge=0,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "memory",
        "fraction of a GPU's memory that a worker may use for weights, workspace and KV cache",
        "FRACTION",
        gt=0,
        le=1,
    )
    batch_invariant: bool = setting(
        False,
        "workers",
        "on a GPU, compute each request's tokens with the same bits whatever else is in the batch: "
        "one tiling for all matrix products, no split keys; slower",
    )
    cuda_graphs: bool = advanced(
        True, "workers", "on a GPU, capture steps up to 512 tokens as CUDA graphs at the start"
    )
    kernel_choices: str = ""


@dataclass(frozen=True, slots=True)
class KVSettings:
    """Format and size of the KV cache.

    `kv_slots` None: as many as fit in `kv_memory`, the total over all workers; both None: the
    worker chooses from the free memory, at most `kv_memory_limit` if that is not 0. So it does for
    `num_states` 0, the state slots of a model with recurrent layers.
    """

    kv_cache_dtype: str = setting(
        "auto",
        "memory",
        "dtype of the KV cache; auto: as --dtype on a GPU; on a CPU float16, or bfloat16 if it "
        "has AVX-512 BF16 and the weights are not more precise. float32 is for exact comparisons "
        "of logits on a CPU; int8 holds nearly twice as many tokens as float16",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8"),
    )
    kv_slots: int | None = setting(
        None,
        "memory",
        "size of the KV cache in tokens, rounded up to whole blocks; default: what fits into "
        "memory",
        "N",
        ge=1,
    )
    kv_memory: int | None = setting(
        None,
        "memory",
        "size of the KV cache in bytes, for instance 2GiB; excludes --kv-slots",
        "SIZE",
        unit="bytes",
        ge=1,
    )
    block_size: int = advanced(16, "memory", "KV slots in a block", "N", ge=1, le=4096)
    num_states: int = 0
    kv_memory_limit: int = 0

    def __post_init__(self) -> None:
        if self.kv_slots and self.kv_memory:
            raise ValueError("--kv-slots and --kv-memory exclude each other: give one of them")

    @property
    def num_blocks(self) -> int:
        """The blocks that `kv_slots` needs; 0 if their number is left to the worker."""
        return -(-(self.kv_slots or 0) // self.block_size)


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where KV is kept beside the device: in host memory, on disk, and in a shared store."""

    host_kv_memory: int = setting(
        0,
        "memory",
        "size of the host tier, which holds the KV cache of requests that are swapped out, and "
        "prefixes that the KV cache has no room for; 0: none",
        "SIZE",
        unit="bytes",
        ge=0,
    )
    disk_kv: str = setting(
        "",
        "memory",
        "directory of the disk tier, which keeps KV blocks of prefixes, also after the server has "
        "ended; for a single worker. The files contain what prompts were about, and are "
        "readable by their owner only",
        "DIR",
    )
    disk_kv_memory: int = setting(
        10 << 30, "memory", "size of the disk tier of one model", "SIZE", unit="bytes", ge=1
    )
    disk_kv_shared: bool = False  # with the server before or after this one, until one has ended
    kv_store: str = advanced(
        "",
        "memory",
        "store of KV blocks that servers of one model share, as mooncake://HOST:PORT (the address "
        "of mooncake_master; options: protocol, metadata, devices, host, segment); for a single "
        "worker. The store gets what prompts were about",
        "URL",
    )


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to load its part of a model.

    `task` is "generate", "embed", "score", or "auto": as the checkpoint is meant. `mmproj` is the
    file of a GGUF model's image encoder; "": none. `max_model_len`
    0: the checkpoint's own limit. With `traces` the worker reports the times of each step. With
    `lookahead`, a step may use tokens that only the workers know (`LAST_TOKEN`). The LoRA adapters
    `loras` are loaded with the model; no module of an adapter may have a higher rank than
    `max_lora_rank`. `draft_model` is a smaller checkpoint with the same vocabulary, which proposes
    drafts; "": none. With `has_mtp` the checkpoint's own layer for multi-token prediction proposes
    them. With `logs_json` each line of the worker's log is a JSON object. The model has
    `num_replicas` on this machine; the workers of this one use the `cores`, all if there are none.
    """

    model: str
    task: str = "auto"
    mmproj: str = ""
    kernels: Kernels = Kernels()
    kv: KVSettings = KVSettings()
    tiers: Tiers = Tiers()
    max_model_len: int = 0
    max_batch_tokens: int = 2048
    max_batch_size: int = 64
    traces: bool = False
    lookahead: int = 0
    loras: tuple[LoraSpec, ...] = ()
    max_lora_rank: int = 64
    draft_model: str = ""
    has_mtp: bool = False
    logs_json: bool = False
    num_replicas: int = 1
    cores: tuple[int, ...] = ()
    placement: Placement = Placement()


@dataclass(frozen=True, slots=True)
class TierReport:
    """What the tiers beside the device have.

    `disk_hashes` are the contents of the disk tier's slots, `HASH_BYTES` each, zeros for an unused
    one; `disk_state_hashes` those of its slots for snapshots. `kv_store_keys` names all that the
    contents of the shared store depend on.
    """

    num_host_blocks: int = 0
    num_host_states: int = 0
    disk_hashes: bytes = b""
    disk_state_hashes: bytes = b""
    kv_store_keys: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker reports after loading: facts about the model and the number of KV blocks.

    `num_parameters` is of the whole model; `bytes_per_block` and `threads` are this worker's own.
    `kernels` describes the kernels in use, for logs. `loras` answers the settings' adapters
    in their order. `windows` has the sliding window of each layer group, None for a group that
    keeps the KV of all tokens; `bytes_per_block` is the size of a block of one group. `pooling` is
    None if the model generates text. `num_draft_parameters` is the size of the draft model, or
    of the layer for multi-token prediction and the head; 0 without one. `encoder` is None if the
    model reads no images. `graphs` are the numbers of tokens to which steps with pieces of prompts
    are padded, ascending.
    """

    architecture: str
    num_parameters: int
    dtype: str
    device: str
    attention: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    bytes_per_block: int
    threads: int
    weights: str = "float32"
    kv_dtype: str = "float32"
    kernels: str = "torch"
    loras: tuple[LoraReport, ...] = ()
    windows: tuple[int | None, ...] = (None,)
    num_states: int = 0
    bytes_per_state: int = 0
    pooling: PoolingReport | None = None
    num_draft_parameters: int = 0
    encoder: EncoderReport | None = None
    graphs: tuple[int, ...] = ()
    tiers: TierReport = TierReport()
